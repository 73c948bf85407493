// Plain casts to every format, and the way back by table.

#pragma once

#include "elements.h"

namespace lowp {
namespace {

constexpr int64_t kCastChunk = 1024;  // elements worked on while they are in the first cache

// Inf and NaN are kept where the format has codes for them.
template <class In, class Format>
void keep_specials(const typename In::Bits* __restrict x, uint8_t* __restrict y, int64_t count) {
    typename In::Bits largest = 0;
    for (int64_t i = 0; i < count; i++) largest = max<typename In::Bits>(largest, x[i] & In::magnitude);
    if (largest < In::nonfinite) return;
    for (int64_t i = 0; i < count; i++) {
        uint32_t u = pattern<In>(x[i]), a = u & 0x7FFFFFFFu;
        if (a >= 0x7F800000u)
            y[i] = uint8_t((a == 0x7F800000u ? Format::inf : Format::nan) | (u >> 24 & 0x80));
    }
}

template <class In, class Format>
void encode_range(const typename In::Bits* x, uint8_t* y, int64_t first, int64_t last) {
    uint8_t codes[kCastChunk];
    for (int64_t at = first; at < last; at += kCastChunk) {
        int64_t count = min(kCastChunk, last - at);
        uint8_t* to = Format::bits_per_code == 4 ? codes : y + at;
        round_line<Format>(to, count, [from = x + at](int64_t i) { return pattern<In>(from[i]); });
        if constexpr (Format::specials) keep_specials<In, Format>(x + at, to, count);
        if constexpr (Format::bits_per_code == 4)
            for (int64_t i = 0; i < count / 2; i++)
                y[at / 2 + i] = uint8_t(codes[2 * i] | codes[2 * i + 1] << 4);
    }
}

// E8M0: to nearest, halves up; below 2^-126, up from the smallest value on, as in ml_dtypes. What is not a
// positive number, or rounds beyond 2^127, is NaN.
struct CodeE8M0 {
    static constexpr bool specials = false;
    static constexpr int bits_per_code = 8;

    static INLINE uint32_t code(uint32_t u) {
        uint32_t mantissa = u & 0x7FFFFF, exponent = u >> 23;
        uint32_t up = mantissa > (exponent > 0 ? 0x3FFFFFu : 0x400000u) ? 1 : 0;
        return u == 0 || exponent + up > 0xFF ? 0xFF : exponent + up;
    }
};

void cast_encode(const void* x, uint8_t* y, int64_t first, int64_t last, int input, int format) {
    with_input(input, [&](auto in) {
        using In = decltype(in);
        auto* from = static_cast<const typename In::Bits*>(x);
        if (format == kNpuE8M0) return encode_range<In, CodeE8M0>(from, y, first, last);
        with_format(format, [&](auto code) { encode_range<In, decltype(code)>(from, y, first, last); });
    });
}

template <class T>
void look_up_range(const uint8_t* __restrict codes, const void* table, void* out, int64_t first,
                   int64_t last) {
    const T* __restrict values = static_cast<const T*>(table);
    T* __restrict to = static_cast<T*>(out);
    for (int64_t i = first; i < last; i++) to[i] = values[codes[i]];
}

void cast_look_up(const uint8_t* codes, const void* table, void* out, int64_t first, int64_t last, int size) {
    auto* f = size == 2   ? look_up_range<uint16_t>
              : size == 4 ? look_up_range<uint32_t>
                          : look_up_range<uint64_t>;
    f(codes, table, out, first, last);
}

}  // namespace
}  // namespace lowp
