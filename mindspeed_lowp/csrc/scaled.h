// Arguments of the kernels of quantization with fp32 scales.

#pragma once

#include <cstdint>

namespace lowp {

constexpr int64_t kLine = 512;  // most elements that encode_each takes

// A rectangle of a row-major matrix: `rows` lines of `cols` elements, `ld` apart, the first at `first`.
struct Tile {
    int64_t first, rows, cols, ld;
};

// Elements are numbered in x and y alike. Formats are torch_npu's codes. Magnitudes are fp32 patterns without
// sign, which compare as integers; NaN is the largest.
struct ScaledKernels {
    // The largest magnitude, of finite elements only if so asked.
    uint32_t (*amax)(const void* x, const Tile& tile, int input, int finite_only);
    // The same of each line's elements times factor[column].
    uint32_t (*amax_of_products)(const void* x, const Tile& tile, const float* factor, int input);
    // Raises amax[column] to the magnitudes of one line, each times factor.
    void (*raise_columns)(const void* x, const Tile& line, float factor, uint32_t* amax, int input);
    // Codes of x / scale.
    void (*encode)(const void* x, uint8_t* y, const Tile& tile, float scale, int input, int format);
    // Codes of x * factor / scale + offset, or x * factor * scale + offset, with one of each for each column
    // of one line of at most kLine elements.
    void (*encode_each)(const void* x, uint8_t* y, const Tile& line, const float* factor, const float* scale,
                        const float* offset, int divide, int input, int format);
    // Codes of all 65536 patterns of a 16-bit input type, by `encode` with this scale.
    void (*tabulate)(uint8_t* table, float scale, int input, int format);
    // y = table[x] for elements first to last.
    void (*look_up)(const void* x, uint8_t* y, const uint8_t* table, int64_t first, int64_t last);
};

}  // namespace lowp
