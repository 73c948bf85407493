// FP4 codes and scales of MX blocks.
//
// A code is found by comparing an element's magnitude with seven thresholds: it is the number of those
// reached. Magnitudes and thresholds are compared as bit patterns, which order like the numbers they stand
// for, so that no element is multiplied by a scale or rounded: a power of two only adds to the exponent.

#pragma once

#include "formats.h"
#include "kernels.h"

namespace lowp {
namespace {

constexpr int kThresholds = 7;

// Below this scale byte a threshold may be subnormal. Such blocks are lifted by 2^kLift first.
constexpr uint8_t kLowestFP4 = 4;
constexpr int32_t kLift = 32;

// The patterns of the thresholds (for a scale of 1, without the exponent's bias) in lanes of bf16 or fp32.
template <class Lane>
struct Thresholds {
    Lane at[kThresholds];
    Lane down;  // 1 if negative elements round away from zero
};

struct FP4 {
    static constexpr int per_byte = 2;

    int32_t emax;
    float limit;
    int32_t carry_above;  // significand bits of the bf16 above which alg 2 carries; -1 if it divides
    Thresholds<int16_t> narrow;
    Thresholds<int32_t> wide;

    explicit FP4(const Quant& q) {
        const uint8_t* codes = q.format == kE2M1 ? kE2M1AsE4M3 : kE1M2AsE4M3;
        auto value = [&](int code) { return E4M3::decode(uint32_t(codes[code]) << 24); };
        emax = int32_t(bits(value(7)) >> 23) - 127;
        limit = q.rule.limit > 0 ? q.rule.limit : value(7);
        carry_above = limit == 6 ? 0x40 : limit == 7 ? 0x60 : limit == 1.875f ? 0x70 : -1;
        bool floor = q.round_mode == kFloor;
        narrow.down = wide.down = floor;
        for (int i = 0; i < kThresholds; i++) {
            float threshold = floor ? value(i + 1) : (value(i) + value(i + 1)) / 2;
            int32_t pattern = int32_t(bits(threshold)) - (127 << 23);
            int32_t beyond = q.round_mode == kRint && i % 2 == 0;  // at a tie, the even code is the one below
            narrow.at[i] = int16_t((pattern >> 16) + beyond);
            wide.at[i] = pattern + beyond;
        }
    }
};

template <class In>
uint8_t scale_byte(typename In::Bits amax, const FP4& codec, MxScaleRule rule) {
    uint32_t u = bits(In::value(amax));
    int32_t byte;
    if (rule.alg == 0) {
        byte = int32_t(u >> 23) - codec.emax;
    } else if (codec.carry_above >= 0) {
        int32_t b = int32_t((u + 0x7FFF + (u >> 16 & 1)) >> 16);  // rounded to bf16
        byte = (b >> 7) + (b >= 0x80 && (b & 0x7F) > codec.carry_above) - codec.emax;
    } else {
        uint32_t s = bits(as_float(u) / codec.limit);
        int32_t exponent = int32_t(s >> 23);
        byte = exponent + (exponent > 0 && exponent < 254 && (s & 0x7FFFFF) > 0);
    }
    return uint8_t(amax >= In::nonfinite ? 0xFF : min(max(byte, 0), 254));
}

// A pattern's lanes: of bf16 as they are, of everything else as fp32.
template <class In, class Lane>
Lane magnitude(typename In::Bits x, float lift) {
    if constexpr (sizeof(Lane) == 2)
        return Lane(x & 0x7FFF);
    else
        return Lane(bits(as_float(bits(In::value(x)) & 0x7FFFFFFFu) * lift));
}

template <class Lane>
Lane base_of(uint8_t byte) {
    if constexpr (sizeof(Lane) == 2)
        return Lane(max(byte, kLowestFP4) << 7);
    else
        return Lane((byte + (byte < kLowestFP4 ? kLift : 0)) << 23);
}

float lift_of(uint8_t byte) { return byte < kLowestFP4 ? as_float(uint32_t(127 + kLift) << 23) : 1.0f; }

// What a block's scale adds to a pattern, and its lift: the same for all elements or one for each.
template <class Lane>
struct SameBase {
    Lane base;
    float lift;
    explicit SameBase(uint8_t byte) : base(base_of<Lane>(byte)), lift(lift_of(byte)) {}
    Lane base_at(int64_t) const { return base; }
    float lift_at(int64_t) const { return lift; }
};

template <class Lane>
struct EachBase {
    const Lane* base;
    const float* lift;  // not used for bf16's lanes
    Lane base_at(int64_t i) const { return base[i]; }
    float lift_at(int64_t i) const { return sizeof(Lane) == 2 ? 1.0f : lift[i]; }
};

// Codes of at most kBlock (an even number of) elements.
template <class In, class Lane, class Base>
INLINE void encode_fp4(const typename In::Bits* __restrict x, uint8_t* __restrict y, int64_t count,
                       const Base& base, const Thresholds<Lane>& thresholds) {
    constexpr int top = 8 * sizeof(typename In::Bits) - 1;  // the sign's bit
    Lane codes[kBlock];
    for (int64_t i = 0; i < count; i++) {
        Lane a = magnitude<In, Lane>(x[i], base.lift_at(i));
        Lane sign = Lane(x[i] >> top);
        Lane down = Lane(sign & thresholds.down);
        Lane above = Lane(a - base.base_at(i) - down);
        Lane code = Lane(down & (a > 0));
        for (int t = 0; t < kThresholds; t++) code = Lane(code + (above >= thresholds.at[t]));
        codes[i] = Lane(min(code, Lane(7)) | sign << 3);
    }
    for (int64_t i = 0; i < count / 2; i++) y[i] = uint8_t(codes[2 * i] | codes[2 * i + 1] << 4);
}

// The same, telling the compiler the usual count. (Not inlined, for there are many callers and much code.)
template <class In, class Lane, class Base>
__attribute__((noinline)) void encode_fp4_any(const typename In::Bits* x, uint8_t* y, int64_t count,
                                              const Base& base, const Thresholds<Lane>& thresholds) {
    if (count == kBlock)
        encode_fp4<In, Lane>(x, y, kBlock, base, thresholds);
    else
        encode_fp4<In, Lane>(x, y, count, base, thresholds);
}

// Whether a block's thresholds are normal numbers; one of zeros is served with any.
template <class Bits>
bool ordinary_fp4(Bits amax, uint8_t byte) {
    return byte != 0xFF && (byte >= kLowestFP4 || amax == 0);
}

template <class In>
INLINE void encode_block(const typename In::Bits* x, uint8_t* y, int64_t count, typename In::Bits amax,
                         uint8_t byte, const FP4& codec) {
    if (byte == 0xFF) {
        memset(y, 0, count / 2);
        return;
    }
    if constexpr (is_bf16<In>) {
        if (ordinary_fp4(amax, byte))
            return encode_fp4_any<In>(x, y, count, SameBase<int16_t>{byte}, codec.narrow);
    }
    encode_fp4_any<In>(x, y, count, SameBase<int32_t>{byte}, codec.wide);
}

// One block's rows by at most kChunk columns.
template <class In, class Lane>
void encode_columns_fp4(const typename In::Bits* x, uint8_t* y, int64_t ld, int64_t rows, int64_t cols,
                        const uint8_t* bytes, const Thresholds<Lane>& thresholds) {
    Lane base[kChunk];
    float lift[sizeof(Lane) == 2 ? 1 : kChunk];
    for (int64_t c = 0; c < cols; c++) base[c] = base_of<Lane>(bytes[c]);
    if constexpr (sizeof(Lane) == 4)
        for (int64_t c = 0; c < cols; c++) lift[c] = lift_of(bytes[c]);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c += kBlock)
            encode_fp4_any<In>(x + r * ld + c, y + (r * ld + c) / 2, min(kBlock, cols - c),
                               EachBase<Lane>{base + c, sizeof(Lane) == 2 ? lift : lift + c}, thresholds);
}

template <class In>
INLINE void encode_columns(const typename In::Bits* x, uint8_t* y, int64_t ld, int64_t rows, int64_t cols,
                           const typename In::Bits* amax, const uint8_t* bytes, const FP4& codec) {
    if constexpr (is_bf16<In>) {
        bool all = true;
        for (int64_t c = 0; c < cols; c++) all &= ordinary_fp4(amax[c], bytes[c]);
        if (all) return encode_columns_fp4<In>(x, y, ld, rows, cols, bytes, codec.narrow);
    }
    encode_columns_fp4<In>(x, y, ld, rows, cols, bytes, codec.wide);
    for (int64_t c = 0; c < cols; c++)
        if (bytes[c] == 0xFF)
            for (int64_t r = 0; r < rows; r++) y[(r * ld + c) / 2] &= c % 2 ? 0x0F : 0xF0;
}

}  // namespace
}  // namespace lowp
