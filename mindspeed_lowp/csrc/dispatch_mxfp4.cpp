// The C interface of MXFP4 fake quantization.

#include "dispatch.h"

using namespace lowp;

// x and y [rows, n], blocks along n.
LOWP_API void lowp_mxfp4_quant_dequant(const void* x, void* y, int64_t rows, int64_t n, int64_t block,
                                       float divisor, int mode, int input, int threads) {
    Mxfp4 q{x, y, block, divisor, mode, input};
    prefer_huge_pages(y, rows * n * (input == kF32 ? 4 : 2));
    int64_t part = kMxfp4Blocks * block, parts = ceil_div(n, part);
    parallel(rows * parts, rows * n, threads, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; t++) {
            int64_t row = t / parts, begin = t % parts * part;
            active->mxfp4.quant_dequant(q, row * n + begin, std::min(part, n - begin));
        }
    });
}
