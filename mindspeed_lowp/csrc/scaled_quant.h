// Quantization with fp32 scales: largest magnitudes, and codes of quotients.

#pragma once

#include "elements.h"
#include "mx_quant.h"

namespace lowp {
namespace {

INLINE uint32_t magnitude(float value) { return bits(value) & 0x7FFFFFFFu; }

template <class In>
INLINE typename In::Bits largest_finite(const typename In::Bits* x, int64_t count) {
    using Bits = typename In::Bits;
    Bits amax = 0;
    for (int64_t i = 0; i < count; i++) {
        Bits m = x[i] & In::magnitude;
        amax = max<Bits>(amax, m & mask<Bits>(m < In::nonfinite));
    }
    return amax;
}

template <class In>
INLINE uint32_t largest_product(const typename In::Bits* __restrict x, const float* __restrict factor,
                                int64_t count) {
    int32_t amax = 0;
    for (int64_t i = 0; i < count; i++)
        amax = max(amax, int32_t(magnitude(as_float(pattern<In>(x[i])) * factor[i])));
    return uint32_t(amax);
}

uint32_t scaled_amax(const void* x, const Tile& t, int input, int finite_only) {
    uint32_t result = 0;
    with_input(input, [&](auto in) {
        using In = decltype(in);
        using Bits = typename In::Bits;
        Bits amax = 0;
        for (int64_t r = 0; r < t.rows; r++) {
            const Bits* line = static_cast<const Bits*>(x) + t.first + r * t.ld;
            amax = max(amax, finite_only ? largest_finite<In>(line, t.cols) : largest<In>(line, t.cols));
        }
        result = pattern<In>(amax);
    });
    return result;
}

uint32_t scaled_amax_of_products(const void* x, const Tile& t, const float* factor, int input) {
    uint32_t amax = 0;
    with_input(input, [&](auto in) {
        using In = decltype(in);
        auto* from = static_cast<const typename In::Bits*>(x) + t.first;
        for (int64_t r = 0; r < t.rows; r++)
            amax = max(amax, largest_product<In>(from + r * t.ld, factor, t.cols));
    });
    return amax;
}

void scaled_raise_columns(const void* x, const Tile& t, float factor, uint32_t* __restrict amax, int input) {
    with_input(input, [&](auto in) {
        using In = decltype(in);
        auto* __restrict from = static_cast<const typename In::Bits*>(x) + t.first;
        for (int64_t c = 0; c < t.cols; c++)
            amax[c] = max(amax[c], magnitude(as_float(pattern<In>(from[c])) * factor));
    });
}

void scaled_encode(const void* x, uint8_t* y, const Tile& t, float scale, int input, int format) {
    with_input(input, [&](auto in) {
        using In = decltype(in);
        with_format(format, [&](auto code) {
            for (int64_t r = 0; r < t.rows; r++) {
                auto* from = static_cast<const typename In::Bits*>(x) + t.first + r * t.ld;
                round_line<decltype(code)>(y + t.first + r * t.ld, t.cols, [from, scale](int64_t i) {
                    return bits(as_float(pattern<In>(from[i])) / scale);
                });
            }
        });
    });
}

void scaled_encode_each(const void* x, uint8_t* y, const Tile& t, const float* factor, const float* scale,
                        const float* offset, int divide, int input, int format) {
    with_input(input, [&](auto in) {
        using In = decltype(in);
        auto* from = static_cast<const typename In::Bits*>(x) + t.first;
        auto value = [from, factor](int64_t i) { return as_float(pattern<In>(from[i])) * factor[i]; };
        with_format(format, [&](auto code) {
            if (divide)
                round_line<decltype(code)>(y + t.first, t.cols, [value, scale, offset](int64_t i) {
                    return bits(value(i) / scale[i] + offset[i]);
                });
            else
                round_line<decltype(code)>(y + t.first, t.cols, [value, scale, offset](int64_t i) {
                    return bits(value(i) * scale[i] + offset[i]);
                });
        });
    });
}

void scaled_tabulate(uint8_t* table, float scale, int input, int format) {
    uint16_t every[kLine];
    for (int64_t first = 0; first < 0x10000; first += kLine) {
        for (int64_t i = 0; i < kLine; i++) every[i] = uint16_t(first + i);
        scaled_encode(every, table + first, Tile{0, 1, kLine, kLine}, scale, input, format);
    }
}

void scaled_look_up(const void* x, uint8_t* __restrict y, const uint8_t* __restrict table, int64_t first,
                    int64_t last) {
    const uint16_t* from = static_cast<const uint16_t*>(x);
    int64_t i = first;
    for (; i + 4 <= last; i += 4) {
        __builtin_prefetch(from + i + 512);
        uint64_t four;
        memcpy(&four, from + i, sizeof four);
        uint32_t codes = table[four & 0xFFFF] | table[four >> 16 & 0xFFFF] << 8 |
                         table[four >> 32 & 0xFFFF] << 16 | uint32_t(table[four >> 48]) << 24;
        memcpy(y + i, &codes, sizeof codes);
    }
    for (; i < last; i++) y[i] = table[from[i]];
}

}  // namespace
}  // namespace lowp
