// The C interface of the MX kernels.

#include "dispatch.h"

namespace lowp {
namespace {

using RowKernel = void (*)(const Quant&, const RowPair&, int64_t, int64_t);

// Tasks are pairs of blocks along n times chunks of columns, in the order of memory.
void run_pairs(const Quant& q, RowKernel kernel, int threads) {
    int64_t length = 2 * q.block, pairs = ceil_div(q.n, length), chunks = ceil_div(q.inner, kChunk);
    parallel(q.outer * pairs * chunks, q.outer * q.n * q.inner, threads, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; t++) {
            int64_t chunk = t % chunks, pair = t / chunks % pairs, outer = t / chunks / pairs;
            int64_t row = pair * length;
            RowPair p{outer * q.n + row, std::min(length, q.n - row), outer * pairs + pair};
            kernel(q, p, chunk * kChunk, std::min(q.inner, (chunk + 1) * kChunk));
        }
    });
}

int64_t code_bytes(const Quant& q) { return q.outer * q.n * q.inner / (q.format >= kE2M1 ? 2 : 1); }

}  // namespace
}  // namespace lowp

using namespace lowp;

// The last arguments of all quantizers: input, format and round_mode as in kernels.h and mx.h; scale_alg and
// dst_type_max as torch_npu's.

// x [outer, n, inner]: blocks along n. inner == 1 is the last axis.
LOWP_API void lowp_mx_quant(const void* x, uint8_t* y, uint8_t* scale, int64_t outer, int64_t n,
                            int64_t inner, int64_t block, float max_low_bound, int input, int format,
                            int round_mode, int scale_alg, float dst_type_max, int threads) {
    MxScaleRule rule{scale_alg, dst_type_max, max_low_bound};
    Quant q{x, y, scale, nullptr, nullptr, outer, n, inner, block, input, format, round_mode, rule};
    prefer_huge_pages(y, code_bytes(q));
    if (inner == 1) {
        parallel(outer, outer * n, threads,
                 [&](int64_t first, int64_t last) { active->mx.quant_last(q, first, last); });
    } else {
        run_pairs(q, active->mx.quant_rows, threads);
    }
}

// x [outer, rows, cols]: y, scale along cols; y2, scale2 along rows.
LOWP_API void lowp_mx_quant_dual(const void* x, uint8_t* y, uint8_t* scale, uint8_t* y2, uint8_t* scale2,
                                 int64_t outer, int64_t rows, int64_t cols, int input, int format,
                                 int round_mode, int scale_alg, float dst_type_max, int threads) {
    MxScaleRule rule{scale_alg, dst_type_max, 0};
    Quant q{x, y, scale, y2, scale2, outer, rows, cols, kBlock, input, format, round_mode, rule};
    prefer_huge_pages(y, code_bytes(q));
    prefer_huge_pages(y2, code_bytes(q));
    run_pairs(q, active->mx.quant_dual, threads);
}

// x [outer, rows, cols]: one scale for each tile of kBlock x kBlock, written for both axes.
LOWP_API void lowp_mx_quant_tiles(const void* x, uint8_t* y, uint8_t* scale, uint8_t* scale2, int64_t outer,
                                  int64_t rows, int64_t cols, int input, int format, int round_mode,
                                  int scale_alg, float dst_type_max, int threads) {
    MxScaleRule rule{scale_alg, dst_type_max, 0};
    Quant q{x, y, scale, nullptr, scale2, outer, rows, cols, kBlock, input, format, round_mode, rule};
    prefer_huge_pages(y, code_bytes(q));
    run_pairs(q, active->mx.quant_tiles, threads);
}

// x [rows, cols]: blocks along rows, restarting at each group. `scale` must be zeroed: rows between groups
// are not written.
LOWP_API void lowp_mx_quant_grouped(const void* x, uint8_t* y, uint8_t* scale, const int64_t* ends,
                                    int64_t groups, int64_t rows, int64_t cols, int input, int format,
                                    int round_mode, int scale_alg, float dst_type_max, int threads) {
    MxScaleRule rule{scale_alg, dst_type_max, 0};
    Quant q{x, y, scale, nullptr, nullptr, 1, rows, cols, kBlock, input, format, round_mode, rule};
    prefer_huge_pages(y, code_bytes(q));
    int64_t chunks = ceil_div(cols, kChunk), pairs = 0;
    for (int64_t g = 0; g < groups; g++) pairs += ceil_div(ends[g] - (g ? ends[g - 1] : 0), kPair);
    parallel(pairs * chunks, rows * cols, threads, [&](int64_t first, int64_t last) {
        int64_t task = 0;  // of the current group's first pair
        for (int64_t g = 0; g < groups; g++) {
            int64_t start = g ? ends[g - 1] : 0, count = ceil_div(ends[g] - start, kPair) * chunks;
            for (int64_t t = std::max(first, task); t < std::min(last, task + count); t++) {
                int64_t pair = (t - task) / chunks, chunk = (t - task) % chunks, row = start + pair * kPair;
                RowPair p{row, std::min(kPair, ends[g] - row), start / kPair + g + pair};
                active->mx.quant_rows(q, p, chunk * kChunk, std::min(cols, (chunk + 1) * kChunk));
            }
            task += count;
        }
    });
}

LOWP_API void lowp_mx_dequant(const uint8_t* codes, const uint8_t* scale, void* out, int64_t batch,
                              int64_t rows, int64_t cols, int64_t batch_stride, int64_t row_stride,
                              int64_t col_stride, int64_t scale_batch, int64_t scale_pair, int64_t scale_line,
                              int64_t scale_byte, int axis, int packed_axis, int format, int output,
                              int threads) {
    Dequant d{codes,      scale,      out,         batch,      rows,       cols,       batch_stride,
              row_stride, col_stride, scale_batch, scale_pair, scale_line, scale_byte, axis,
              packed_axis, format,    output};
    prefer_huge_pages(out, batch * rows * cols * (output == kF32 ? 4 : 2));
    int64_t bands = ceil_div(rows, kBlock), chunks = ceil_div(cols, kChunk);
    parallel(batch * bands * chunks, batch * rows * cols, threads, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; t++) {
            int64_t chunk = t % chunks, band = t / chunks % bands, b = t / chunks / bands;
            active->mx.dequant(d, b, band * kBlock, std::min(rows, (band + 1) * kBlock), chunk * kChunk,
                               std::min(cols, (chunk + 1) * kChunk));
        }
    });
}
