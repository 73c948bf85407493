// The rounding of an fp32 bit pattern to a code of each element format, as the quantizers round: to nearest,
// beyond the largest value to the largest, NaN to +0.

#pragma once

#include <type_traits>

#include "formats.h"
#include "kernels.h"

namespace lowp {
namespace {

// Each struct's `code` takes an fp32 pattern (HiFloat8's: its upper half).

// Selecting with masks keeps compilers from making branches, with which they do not vectorize a loop.
template <class T>
INLINE T mask(bool b) {
    return T(-T(b));
}

// The fp32 pattern of any input, Inf and NaN included.
template <class In>
INLINE uint32_t pattern(typename In::Bits x) {
    uint32_t u = bits(In::value(x));
    if constexpr (std::is_same<In, F16>::value)  // whose `value` is that of finite numbers
        u |= mask<uint32_t>((x & F16::magnitude) >= F16::nonfinite) & 0x7F800000u;
    return u;
}

using E2M1 = Element<1, 1, 2, 0x40C00000, 0x80>;  // 6; neither Inf nor NaN
using E1M2 = Element<2, 1, 0, 0x3FE00000, 0x80>;  // 1.75

// `Bits` sign-and-magnitude bits, ties to even; finite codes by Element. `inf` and `nan` are what a plain
// cast makes of them.
template <class Format, int Bits, uint32_t Inf, uint32_t NaN>
struct Rounded {
    static constexpr bool specials = Inf != 0;
    static constexpr uint32_t inf = Inf, nan = NaN;
    static constexpr int bits_per_code = Bits;

    static INLINE uint32_t code(uint32_t u) {
        uint32_t a = u & 0x7FFFFFFFu, sign = u >> (32 - Bits) & 1u << (Bits - 1);
        uint32_t magnitude = Format::encode(min(a, Format::max_bits)) & ((1u << (Bits - 1)) - 1);
        return (magnitude | sign) & ~mask<uint32_t>(a > 0x7F800000u);
    }
};

struct CodeE4M3 : Rounded<E4M3, 8, 0x7F, 0x7F> {};
struct CodeE5M2 : Rounded<E5M2, 8, 0x7C, 0x7E> {};
struct CodeE2M1 : Rounded<E2M1, 4, 0, 0> {};
struct CodeE1M2 : Rounded<E1M2, 4, 0, 0> {};

// Ties to even, saturating at -128 and 127.
struct CodeINT8 {
    static constexpr bool specials = false;
    static constexpr uint32_t inf = 0, nan = 0;
    static constexpr int bits_per_code = 8;

    static INLINE uint32_t code(uint32_t u) {
        uint32_t a = u & 0x7FFFFFFFu, negative = u >> 31;
        // Adding 2^23 makes the FPU round to an integer, which the low bits of the sum hold.
        uint32_t magnitude = bits(as_float(min(a, 0x42FE0000u + (negative << 16))) + 0x1p23f) & 0xFF;
        return ((magnitude ^ (0u - negative)) + negative) & ~mask<uint32_t>(a > 0x7F800000u);
    }
};

// HiFloat8, ties away from zero. That needs no bit below the first one dropped, so that the upper half of the
// fp32 pattern is enough and the rest is done in 16-bit lanes.
struct CodeHIF8 {
    static constexpr bool specials = true;
    static constexpr uint32_t inf = 0x6F, nan = 0x80;
    static constexpr int bits_per_code = 8;

    // With n the absolute exponent, a normal number has 3, 3, 2, 1 mantissa bits for n < 2, < 4, < 8, < 16,
    // and a denormal (n from 16 on, below 1) none: its code is the exponent + 23.
    static INLINE uint8_t code(uint16_t u) {
        int16_t magnitude = int16_t(u & 0x7FFF), a = min<int16_t>(magnitude, 0x4700);  // 32768
        int16_t n = distance(a);
        int16_t half = int16_t(8 + (mask<int16_t>(n >= 4) & 8) + (mask<int16_t>(n >= 8) & 16) +
                               (mask<int16_t>(n >= 16) & 32));
        int16_t r = int16_t(a + half);  // a carry reaches the exponent
        n = distance(r);
        int16_t both = int16_t(n << 3 | (r >> 4 & 7));  // exponent without its sign, 3 bits of mantissa
        int16_t shorter = min(both, min<int16_t>(int16_t((both >> 1) + 16), int16_t((both >> 2) + 32)));
        int16_t sign = int16_t(8 + (mask<int16_t>(n >= 2) & 8));
        int16_t code = int16_t(shorter + sign + (mask<int16_t>(n >= 4) & 16) + (mask<int16_t>(n >= 8) & 16) +
                               (mask<int16_t>(r < 0x3F80) & sign));
        code = n >= 16 ? max<int16_t>(int16_t(23 - n), 1) : code;
        code = int16_t(code | (u >> 8 & 0x80));
        // Below half the smallest value, 2^-23, and for NaN: +0. There is no negative zero.
        return uint8_t(code & ~mask<int16_t>(a < 0x3400) & ~mask<int16_t>(magnitude > 0x7F80));
    }

private:
    static INLINE int16_t distance(int16_t a) {  // |exponent|
        int16_t e = int16_t((a >> 7) - 127);
        return max<int16_t>(e, int16_t(-e));
    }
};

// Codes of `count` results of fp32 arithmetic, the i-th having the pattern pattern(i). (NaN must have its
// uppermost mantissa bit set, as what arithmetic makes of any NaN has.)
template <class Code, class Pattern>
INLINE void round_line(uint8_t* __restrict y, int64_t count, const Pattern& pattern) {
    if constexpr (std::is_same<Code, CodeHIF8>::value) {
        constexpr int64_t step = 512;  // of elements worked on while they are in the first cache
        uint16_t upper[step];
        for (int64_t at = 0; at < count; at += step) {
            int64_t n = min(step, count - at);
            for (int64_t i = 0; i < n; i++) upper[i] = uint16_t(pattern(at + i) >> 16);
            for (int64_t i = 0; i < n; i++) y[at + i] = Code::code(upper[i]);
        }
    } else {
        for (int64_t i = 0; i < count; i++) y[i] = uint8_t(Code::code(pattern(i)));
    }
}

// Calls f with the struct of an element format.
template <class F>
void with_format(int format, F f) {
    switch (format) {
        case kNpuE4M3:
            return f(CodeE4M3());
        case kNpuE5M2:
            return f(CodeE5M2());
        case kNpuE2M1:
            return f(CodeE2M1());
        case kNpuE1M2:
            return f(CodeE1M2());
        case kNpuHIF8:
            return f(CodeHIF8());
        default:
            return f(CodeINT8());
    }
}

template <class F>
void with_input(int input, F f) {
    switch (input) {
        case kBF16:
            return f(BF16());
        case kF16:
            return f(F16());
        default:
            return f(F32());
    }
}

}  // namespace
}  // namespace lowp
