// Arguments of the MX kernels.

#pragma once

#include <cstdint>

namespace lowp {

enum Format : int { kE4M3 = 0, kE5M2 = 1 };

constexpr int64_t kBlock = 32;         // elements that share a scale
constexpr int64_t kPair = 2 * kBlock;  // two blocks' scales stand side by side
constexpr int64_t kChunk = 2048;       // most columns of one task; a multiple of kPair

// x [outer, n, inner], row-major. Codes have the same shape, scales are [outer, ceil(n / 64), inner, 2].
// For the dual-axis kernel, y2 and scale2 belong to the axis n and y and scale to the axis inner.
struct Quant {
    const void* x;
    uint8_t* y;
    uint8_t* scale;
    uint8_t* y2;
    uint8_t* scale2;
    int64_t outer, n, inner;
    int input, format, scale_alg;
};

// Up to 64 rows of a matrix, quantized along the rows: one row of scales.
struct RowPair {
    int64_t row;        // first row of x and y
    int64_t rows;       // 1 to 64
    int64_t scale_row;  // row of scale
};

// A batch of matrices [rows, cols], with blocks along rows (axis 0) or cols (axis 1), to a row-major output
// of the same shape. One of row_stride and col_stride is 1. The scale of block b and line l (a column for
// axis 0, a row for axis 1) is at batch * scale_batch + b / 2 * scale_pair + b % 2 * scale_byte + l *
// scale_line.
struct Dequant {
    const uint8_t* codes;
    const uint8_t* scale;
    void* out;
    int64_t batch, rows, cols;
    int64_t batch_stride, row_stride, col_stride;
    int64_t scale_batch, scale_pair, scale_line, scale_byte;
    int axis, format, output;
};

struct MxKernels {
    void (*quant_last)(const Quant&, int64_t first_row, int64_t last_row);  // blocks along the last axis
    void (*quant_rows)(const Quant&, const RowPair&, int64_t first_col, int64_t last_col);
    void (*quant_dual)(const Quant&, const RowPair&, int64_t first_col, int64_t last_col);
    void (*dequant)(const Dequant&, int64_t batch, int64_t first_row, int64_t last_row, int64_t first_col,
                    int64_t last_col);
};

}  // namespace lowp
