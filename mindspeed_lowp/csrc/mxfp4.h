// MXFP4 fake quantization: blocks along the last axis, to FP4 (E2M1) and back in one pass.

#pragma once

#include <cstdint>

namespace lowp {

constexpr int64_t kMxfp4Blocks = 64;  // most blocks of one task

// How the exponent of a block's scale becomes an integer.
enum ScaleMode : int { kScaleRound = 0, kScaleFloor = 1, kScaleCeil = 2 };

struct Mxfp4 {
    const void* x;
    void* y;
    int64_t block;  // elements that share a scale
    float divisor;  // of a block's largest magnitude
    int mode;
    int input;
};

struct Mxfp4Kernels {
    // At most kMxfp4Blocks blocks of one row; the first begins at element `first` of x.
    void (*quant_dequant)(const Mxfp4&, int64_t first, int64_t count);
};

}  // namespace lowp
