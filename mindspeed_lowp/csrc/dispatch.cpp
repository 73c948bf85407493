// The C interface that Python calls through ctypes: which CPU level is used.

#include <cstring>

#include "dispatch.h"

namespace lowp {

const Kernels* active = &kernels_base;

namespace {

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

}  // namespace
}  // namespace lowp

using namespace lowp;

// 1 if the library holds kernels of this level ("base", "v3", "v4") and the CPU can run them.
LOWP_API int lowp_supports(const char* level) { return supported(level); }

// Use the kernels of this level from now on. Call only with a supported level.
LOWP_API void lowp_use(const char* level) { active = table(level); }
