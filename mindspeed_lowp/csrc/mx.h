// Arguments of the MX kernels.

#pragma once

#include <cstdint>

namespace lowp {

enum Format : int { kE4M3 = 0, kE5M2 = 1, kE2M1 = 2, kE1M2 = 3 };  // from kE2M1 on, two codes a byte
enum RoundMode : int { kRint = 0, kRound = 1, kFloor = 2 };

constexpr int64_t kBlock = 32;         // elements that share a scale, unless Quant says more
constexpr int64_t kPair = 2 * kBlock;  // two blocks' scales stand side by side
constexpr int64_t kChunk = 2048;       // most columns of one task; a multiple of kPair

// How a block's scale follows from its largest magnitude.
struct MxScaleRule {
    int alg;          // scale_alg of torch_npu
    float limit;      // of FP4: the value that the largest magnitude is scaled to by alg 2
    float low_bound;  // of alg 1: what the largest magnitude is raised to
};

// x [outer, n, inner], row-major. Codes have the same shape (FP4: half as many bytes along the last axis),
// scales are [outer, ceil(n / (2 block)), inner, 2].
// For the kernels of both axes, scale2 (and y2, if each axis has its codes) belongs to the axis n and scale
// (and y) to the axis inner.
struct Quant {
    const void* x;
    uint8_t* y;
    uint8_t* scale;
    uint8_t* y2;
    uint8_t* scale2;
    int64_t outer, n, inner;
    int64_t block;  // elements that share a scale: a multiple of kBlock up to kChunk / 2
    int input, format, round_mode;
    MxScaleRule rule;
};

// Up to two blocks of rows of a matrix, quantized along the rows: one row of scales.
struct RowPair {
    int64_t row;        // first row of x and y
    int64_t rows;       // at least 1
    int64_t scale_row;  // row of scale
};

// A batch of matrices [rows, cols], with blocks along rows (axis 0) or cols (axis 1), to a row-major output
// of the same shape. One of row_stride and col_stride (in bytes) is 1; FP4 codes are packed along that
// dimension, which is that of the rows if packed_axis is 0. The scale of block b and line l (a column for
// axis 0, a row for axis 1) is at batch * scale_batch + b / 2 * scale_pair + b % 2 * scale_byte +
// l * scale_line.
struct Dequant {
    const uint8_t* codes;
    const uint8_t* scale;
    void* out;
    int64_t batch, rows, cols;
    int64_t batch_stride, row_stride, col_stride;
    int64_t scale_batch, scale_pair, scale_line, scale_byte;
    int axis, packed_axis, format, output;
};

struct MxKernels {
    void (*quant_last)(const Quant&, int64_t first_row, int64_t last_row);  // blocks along the last axis
    void (*quant_rows)(const Quant&, const RowPair&, int64_t first_col, int64_t last_col);
    // These two take 16-bit input only.
    void (*quant_dual)(const Quant&, const RowPair&, int64_t first_col, int64_t last_col);
    void (*quant_tiles)(const Quant&, const RowPair&, int64_t first_col, int64_t last_col);
    void (*dequant)(const Dequant&, int64_t batch, int64_t first_row, int64_t last_row, int64_t first_col,
                    int64_t last_col);
};

}  // namespace lowp
