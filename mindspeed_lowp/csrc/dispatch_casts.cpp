// The C interface of the casts.

#include "dispatch.h"

using namespace lowp;

// x [n] to codes of the format with this torch_npu code; n is even for the 4-bit formats.
LOWP_API void lowp_cast_encode(const void* x, uint8_t* y, int64_t n, int input, int format, int threads) {
    prefer_huge_pages(y, n);
    parallel(n / 2 + n % 2, n, threads, [&](int64_t first, int64_t last) {
        active->casts.encode(x, y, 2 * first, std::min(n, 2 * last), input, format);
    });
}

// codes [n] to out [n] of entries of `size` bytes: two elements for the 4-bit formats.
LOWP_API void lowp_cast_look_up(const uint8_t* codes, const void* table, void* out, int64_t n, int size,
                                int threads) {
    prefer_huge_pages(out, n * size);
    parallel(n, n, threads, [&](int64_t first, int64_t last) {
        active->casts.look_up(codes, table, out, first, last, size);
    });
}
