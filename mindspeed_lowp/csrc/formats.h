// Number formats on bit patterns: the input types, and the element formats' casts.

#pragma once

#include <cstdint>
#include <cstring>

namespace lowp {
namespace {

#define INLINE inline __attribute__((always_inline))

uint32_t bits(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

float as_float(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

template <class T>
T min(T a, T b) {
    return a < b ? a : b;
}

template <class T>
T max(T a, T b) {
    return a < b ? b : a;
}

// Input types as bit patterns. Magnitudes compare as integers; anything from `nonfinite` on is Inf or NaN.
struct BF16 {
    using Bits = uint16_t;
    static constexpr Bits magnitude = 0x7FFF, nonfinite = 0x7F80;
    static float value(Bits u) { return as_float(uint32_t(u) << 16); }
    static float low(uint32_t pair) {
        return as_float(pair << 16 & 0x7FFF0000u);
    }  // of two neighbours' magnitudes
    static float high(uint32_t pair) { return as_float(pair & 0x7FFF0000u); }
};

template <class In>
constexpr bool is_bf16 = false;
template <>
constexpr bool is_bf16<BF16> = true;

struct F16 {
    using Bits = uint16_t;
    static constexpr Bits magnitude = 0x7FFF, nonfinite = 0x7C00;
    static float value(Bits u) {
        return as_float(bits(magnitude_at_top(uint32_t(u) << 16)) | (uint32_t(u) << 16 & 0x80000000u));
    }
    static float low(uint32_t pair) { return magnitude_at_top(pair << 16); }
    static float high(uint32_t pair) { return magnitude_at_top(pair & 0xFFFF0000u); }

private:
    static float magnitude_at_top(uint32_t u) {  // of a finite number in the upper half of a word
        uint32_t a = (u & 0x7FFF0000u) >> 3;
        uint32_t subnormal = bits(float(int32_t(a)) * 0x1p-37f), normal = a + (112u << 23);
        return as_float(int32_t(a) < (1 << 23) ? subnormal : normal);
    }
};

struct F32 {
    using Bits = uint32_t;
    static constexpr Bits magnitude = 0x7FFFFFFF, nonfinite = 0x7F800000;
    static float value(Bits u) { return as_float(u); }
};

// Element formats with M mantissa bits and the given bias.
template <int M, int Bias, int EMax, uint32_t MaxBits, uint32_t Special>
struct Element {
    static constexpr int shift = 23 - M;
    static constexpr int emax = EMax;
    static constexpr uint32_t max_bits = MaxBits;                       // of the largest value, as fp32
    static constexpr uint32_t min_normal = uint32_t(128 - Bias) << 23;  // as fp32
    static constexpr uint32_t special = Special;                        // codes from here on are Inf or NaN
    static constexpr uint32_t smallest = uint32_t(127 + 1 - Bias - M) << 23;  // smallest subnormal, as fp32

    // A word whose low 16 bits are the code of a finite magnitude (fp32 bits, not above max_bits), rounded to
    // nearest even.
    //
    // With p the power of two below the magnitude (at least the smallest normal), adding 2^(23 - M) p makes
    // the last bit of the sum worth one step of the format, so that the FPU rounds and the low bits count
    // steps, subnormal or not. What p's exponent contributes to the code is put there before the addition.
    static uint32_t encode(uint32_t a) {
        uint32_t p = max(a & 0x7F800000u, min_normal);
        uint32_t addend = p + (p >> shift) + ((uint32_t(shift) << 23) - (min_normal >> shift));
        return bits(as_float(a) + as_float(addend));
    }

    // The value of a code in the top byte of a word, if it is finite. (Work at the top of 32-bit lanes keeps
    // compilers from narrowing them in mid-course, which costs more in packing than it saves.)
    static float decode(uint32_t code) {
        int32_t a = int32_t(code & 0x7F000000u) >> (24 - shift);
        uint32_t subnormal = bits(float(a) * as_float(smallest - (uint32_t(shift) << 23)));
        uint32_t normal = uint32_t(a) + (uint32_t(127 - Bias) << 23);
        return as_float((a < (1 << 23) ? subnormal : normal) | (code & 0x80000000u));
    }

    // The same for codes from `special` on: Inf or NaN.
    static float decode_special(uint8_t code) {
        uint32_t u = M == 2 ? uint32_t(code & 0x7F) << shift | 0x7F800000u : 0x7FC00000u;
        return as_float(u | uint32_t(code & 0x80) << 24);
    }
};

using E4M3 = Element<3, 7, 8, 0x43E00000, 0x7F>;    // 448; S.1111.111 is NaN, there is no Inf
using E5M2 = Element<2, 15, 15, 0x47600000, 0x7C>;  // 57344; S.11111.00 is Inf, beyond is NaN

// FP4 codes 0 to 7 as the E4M3 codes of the same value; 8 to 15 are their negatives.
constexpr uint8_t kE2M1AsE4M3[8] = {0x00, 0x30, 0x38, 0x3C, 0x40, 0x44, 0x48, 0x4C};  // 0 .5 1 1.5 2 3 4 6
constexpr uint8_t kE1M2AsE4M3[8] = {0x00, 0x28, 0x30, 0x34, 0x38, 0x3A, 0x3C, 0x3E};  // 0 .25 .5 ... 1.75

// Factors of a line's elements: one for all of them.
struct Same {
    float factor;
    float at(int64_t) const { return factor; }
    float even(int64_t) const { return factor; }  // of element 2 i
    float odd(int64_t) const { return factor; }   // of element 2 i + 1
};

// Or one for each of at most N, kept apart for loops that take two elements at a time.
template <int64_t N>
struct Each {
    float all[N], evens[N / 2], odds[N / 2];
    float at(int64_t i) const { return all[i]; }
    float even(int64_t i) const { return evens[i]; }
    float odd(int64_t i) const { return odds[i]; }
    void split(int64_t count) {  // after `all` was filled
        for (int64_t i = 0; i < count / 2; i++) {
            evens[i] = all[2 * i];
            odds[i] = all[2 * i + 1];
        }
    }
};

}  // namespace
}  // namespace lowp
