// What the C interfaces of all families share: the active level's kernels, and work split among threads.

#pragma once

#include <algorithm>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "kernels.h"

#define LOWP_API extern "C" __attribute__((visibility("default")))

namespace lowp {

extern const Kernels* active;  // of the level in use

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
inline void prefer_huge_pages([[maybe_unused]] void* out, [[maybe_unused]] int64_t bytes) {
#ifdef MADV_HUGEPAGE
    constexpr uintptr_t page = 64 * 1024, large = 8 << 20;  // a multiple of every page size in use
    uintptr_t first = (uintptr_t(out) + page - 1) / page * page,
              last = (uintptr_t(out) + bytes) / page * page;
    if (uintptr_t(bytes) >= large) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace lowp
