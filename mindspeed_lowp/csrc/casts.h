// Arguments of the casts' kernels.

#pragma once

#include <cstdint>

namespace lowp {

// Element formats by torch_npu's codes, as they travel in operators.
enum NpuFormat : int {
    kNpuINT8 = 1,
    kNpuHIF8 = 290,
    kNpuE5M2 = 291,
    kNpuE4M3 = 292,
    kNpuE8M0 = 293,
    kNpuE2M1 = 296,
    kNpuE1M2 = 297,
};

struct CastKernels {
    // Codes of the elements first to last of x; two a byte for the 4-bit formats, which need an even `first`
    // and `last`.
    void (*encode)(const void* x, uint8_t* y, int64_t first, int64_t last, int input, int format);
    // out[i] = table[codes[i]] for entries of 2, 4 or 8 bytes.
    void (*look_up)(const uint8_t* codes, const void* table, void* out, int64_t first, int64_t last,
                    int size);
};

}  // namespace lowp
