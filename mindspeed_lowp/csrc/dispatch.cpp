// The C interface that Python calls through ctypes: picks the CPU level and splits the work among threads.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "kernels.h"

namespace lowp {
namespace {

const Kernels* active = &kernels_base;

bool supported(const char* level) {
    if (!strcmp(level, "base")) return true;
#if defined(__x86_64__)
    __builtin_cpu_init();
#ifdef LOWP_HAVE_v3
    bool v3 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    if (!strcmp(level, "v3")) return v3;
#endif
#ifdef LOWP_HAVE_v4
    if (!strcmp(level, "v4"))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl");
#endif
#endif
    return false;
}

const Kernels* table([[maybe_unused]] const char* level) {
#ifdef LOWP_HAVE_v4
    if (!strcmp(level, "v4")) return &kernels_v4;
#endif
#ifdef LOWP_HAVE_v3
    if (!strcmp(level, "v3")) return &kernels_v3;
#endif
    return &kernels_base;
}

// Runs f(first, last) over [0, tasks) on up to `threads` threads, at least kGrain elements each.
//
// Threads are started for each call rather than kept: a pool would be lost in a forked child (data loaders,
// checkpoint writers) and would stand idle beside torch's own. Starting one takes about as long as quantizing
// kGrain / 10 elements.
constexpr int64_t kGrain = 256 * 1024;

template <class F>
void parallel(int64_t tasks, int64_t elements, int threads, F f) {
    int64_t parts = std::min({int64_t(threads), elements / kGrain, tasks});
    if (parts <= 1) return f(int64_t(0), tasks);
    std::vector<std::thread> others;
    others.reserve(parts - 1);
    int64_t part = 1;
    try {
        for (; part < parts; part++) others.emplace_back(f, tasks * part / parts, tasks * (part + 1) / parts);
    } catch (const std::system_error&) {  // no more threads to be had: the caller does the rest
        f(tasks * part / parts, tasks);
    }
    f(int64_t(0), tasks / parts);
    for (auto& thread : others) thread.join();
}

// Asks for huge pages under a large output. Fresh memory is handed out page by page as it is first written,
// and for the operand of a GEMM, written once and read once, that costs several times more than the
// dequantization itself.
void prefer_huge_pages([[maybe_unused]] void* out, [[maybe_unused]] int64_t bytes) {
#ifdef MADV_HUGEPAGE
    constexpr uintptr_t page = 64 * 1024, large = 8 << 20;  // a multiple of every page size in use
    uintptr_t first = (uintptr_t(out) + page - 1) / page * page,
              last = (uintptr_t(out) + bytes) / page * page;
    if (uintptr_t(bytes) >= large) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

using RowKernel = void (*)(const Quant&, const RowPair&, int64_t, int64_t);

// Tasks are pairs of blocks along n times chunks of columns, in the order of memory.
void run_pairs(const Quant& q, RowKernel kernel, int threads) {
    int64_t pairs = ceil_div(q.n, kPair), chunks = ceil_div(q.inner, kChunk);
    parallel(q.outer * pairs * chunks, q.outer * q.n * q.inner, threads, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; t++) {
            int64_t chunk = t % chunks, pair = t / chunks % pairs, outer = t / chunks / pairs;
            RowPair p{outer * q.n + pair * kPair, std::min(kPair, q.n - pair * kPair), outer * pairs + pair};
            kernel(q, p, chunk * kChunk, std::min(q.inner, (chunk + 1) * kChunk));
        }
    });
}

}  // namespace
}  // namespace lowp

using namespace lowp;

#define LOWP_API extern "C" __attribute__((visibility("default")))

// 1 if the library holds kernels of this level ("base", "v3", "v4") and the CPU can run them.
LOWP_API int lowp_supports(const char* level) { return supported(level); }

// Use the kernels of this level from now on. Call only with a supported level.
LOWP_API void lowp_use(const char* level) { active = table(level); }

// x [outer, n, inner]: blocks along n. inner == 1 is the last axis.
LOWP_API void lowp_mx_quant(const void* x, uint8_t* y, uint8_t* scale, int64_t outer, int64_t n,
                            int64_t inner, int input, int format, int scale_alg, int threads) {
    Quant q{x, y, scale, nullptr, nullptr, outer, n, inner, input, format, scale_alg};
    prefer_huge_pages(y, outer * n * inner);
    if (inner == 1) {
        parallel(outer, outer * n, threads,
                 [&](int64_t first, int64_t last) { active->quant_last(q, first, last); });
    } else {
        run_pairs(q, active->quant_rows, threads);
    }
}

// x [outer, rows, cols]: y, scale along cols; y2, scale2 along rows.
LOWP_API void lowp_mx_quant_dual(const void* x, uint8_t* y, uint8_t* scale, uint8_t* y2, uint8_t* scale2,
                                 int64_t outer, int64_t rows, int64_t cols, int input, int format,
                                 int scale_alg, int threads) {
    Quant q{x, y, scale, y2, scale2, outer, rows, cols, input, format, scale_alg};
    prefer_huge_pages(y, outer * rows * cols);
    prefer_huge_pages(y2, outer * rows * cols);
    run_pairs(q, active->quant_dual, threads);
}

// x [rows, cols]: blocks along rows, restarting at each group. `scale` must be zeroed: rows between groups
// are not written.
LOWP_API void lowp_mx_quant_grouped(const void* x, uint8_t* y, uint8_t* scale, const int64_t* ends,
                                    int64_t groups, int64_t rows, int64_t cols, int input, int format,
                                    int scale_alg, int threads) {
    Quant q{x, y, scale, nullptr, nullptr, 1, rows, cols, input, format, scale_alg};
    prefer_huge_pages(y, rows * cols);
    int64_t chunks = ceil_div(cols, kChunk), pairs = 0;
    for (int64_t g = 0; g < groups; g++) pairs += ceil_div(ends[g] - (g ? ends[g - 1] : 0), kPair);
    parallel(pairs * chunks, rows * cols, threads, [&](int64_t first, int64_t last) {
        int64_t task = 0;  // of the current group's first pair
        for (int64_t g = 0; g < groups; g++) {
            int64_t start = g ? ends[g - 1] : 0, count = ceil_div(ends[g] - start, kPair) * chunks;
            for (int64_t t = std::max(first, task); t < std::min(last, task + count); t++) {
                int64_t pair = (t - task) / chunks, chunk = (t - task) % chunks, row = start + pair * kPair;
                RowPair p{row, std::min(kPair, ends[g] - row), start / kPair + g + pair};
                active->quant_rows(q, p, chunk * kChunk, std::min(cols, (chunk + 1) * kChunk));
            }
            task += count;
        }
    });
}

LOWP_API void lowp_mx_dequant(const uint8_t* codes, const uint8_t* scale, void* out, int64_t batch,
                              int64_t rows, int64_t cols, int64_t batch_stride, int64_t row_stride,
                              int64_t col_stride, int64_t scale_batch, int64_t scale_pair, int64_t scale_line,
                              int64_t scale_byte, int axis, int format, int output, int threads) {
    Dequant d{codes,      scale,       out,        batch,      rows,       cols, batch_stride, row_stride,
              col_stride, scale_batch, scale_pair, scale_line, scale_byte, axis, format,       output};
    prefer_huge_pages(out, batch * rows * cols * (output == kF32 ? 4 : 2));
    int64_t bands = ceil_div(rows, kBlock), chunks = ceil_div(cols, kChunk);
    parallel(batch * bands * chunks, batch * rows * cols, threads, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; t++) {
            int64_t chunk = t % chunks, band = t / chunks % bands, b = t / chunks / bands;
            active->dequant(d, b, band * kBlock, std::min(rows, (band + 1) * kBlock), chunk * kChunk,
                            std::min(cols, (chunk + 1) * kChunk));
        }
    });
}
