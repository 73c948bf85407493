// MXFP4 fake quantization of one task.

#pragma once

#include "formats.h"
#include "kernels.h"
#include "mx_quant.h"

namespace lowp {
namespace {

// Where round(log2(s)) in fp32 turns from e to e + 1: the mantissa field of the smallest such s = 2^e * m.
//
// Were log2 exact, that would be the first above sqrt(2), 0x3504F3.34. But log2(s) is rounded to fp32 first,
// and around e + 1/2 fp32 has steps of 2^(k - 23), k = floor(log2(|e + 1/2|)). What falls within half a step
// of e + 1/2 becomes a tie, which goes to the even one of e and e + 1. In units of the last place of s, half
// a step is sqrt(2) ln(2) 2^(k - 1) = 0.98 * 2^(k - 1): 31 at k = 6.
struct TurningPoints {
    uint32_t mantissa[256];  // by the exponent field of s

    constexpr TurningPoints() : mantissa() {
        for (int field = 0; field < 256; field++) {
            int e = field - 127, k = -1;
            for (int n = e < 0 ? -e - 1 : e; n > 0; n /= 2) k++;  // |e + 1/2| = n + 1/2
            double half_step = 0.9802581434685472 * (k < 1 ? (k < 0 ? 0.25 : 0.5) : double(1 << (k - 1)));
            double turn = 3474675.2030133 + (e % 2 ? -half_step : half_step);  // (sqrt(2) - 1) 2^23
            uint32_t below = uint32_t(turn);
            mantissa[field] = below + (double(below) < turn);
        }
    }
};

constexpr TurningPoints kTurningPoints;

// The exponent field of the scale of a block whose largest magnitude is `amax`; 255 if there is none.
uint32_t mxfp4_scale(float amax, const Mxfp4& q) {
    uint32_t s = bits(max(amax / q.divisor, 0x1p-30f));
    uint32_t field = s >> 23;
    uint32_t round = kTurningPoints.mantissa[field & 0xFF], ceil = 1, never = 1 << 23;
    uint32_t turn = q.mode == kScaleRound ? round : q.mode == kScaleCeil ? ceil : never;
    return min(field + ((s & 0x7FFFFF) >= turn), 255u);
}

// Rounds magnitudes, given as bit patterns with `shift` mantissa bits, to E2M1's codes times a scale: as
// integers, adding half a step rounds with halves going up.
template <class Int, int shift, Int inf>
struct ToFP4 {
    static constexpr Int step = Int(1) << shift;  // to the next power of two
    Int quarter, half, one, six;                  // times the scale

    explicit ToFP4(int32_t field)  // the scale's exponent field
        : quarter(Int((field - 2) << shift)),
          half(Int((field - 1) << shift)),
          one(Int(field << shift)),
          six(Int(field < (inf >> shift) - 2 ? one + 2 * step + step / 2 : inf)) {}

    Int operator()(Int a) const {
        Int fine = Int(a + step / 4) & Int(-(step / 2)), coarse = Int(a + step / 2) & Int(-step);
        Int rounded = min(a < one ? max(coarse, half) : fine, six);
        return a < quarter ? Int(0) : rounded;
    }
};

using ToFP4InBF16 = ToFP4<int16_t, 7, 0x7F80>;
using ToFP4InF16 = ToFP4<int16_t, 10, 0x7C00>;
using ToFP4InF32 = ToFP4<int32_t, 23, 0x7F800000>;

// The largest magnitude that vanishes in the division by the scale, as fp32 bits: 2^(e - 150), half of the
// smallest subnormal number times the scale 2^e. Its sign is lost.
int32_t vanishing(uint32_t field) {
    int32_t e = int32_t(field) - 127;
    return e >= 24 ? (e - 23) << 23 : e > 0 ? 1 << (e - 1) : 0;
}

// `count` elements of a block whose scale has this exponent field, below 255.
INLINE void mxfp4_convert(BF16, const uint16_t* __restrict x, uint16_t* __restrict y, int64_t count,
                          uint32_t field) {
    ToFP4InBF16 to_fp4{int32_t(field)};
    int16_t vanish = int16_t(vanishing(field) >> 16);
    for (int64_t i = 0; i < count; i++) {
        int16_t a = int16_t(x[i] & 0x7FFF);
        y[i] = uint16_t(to_fp4(a) | (a > vanish ? x[i] & 0x8000 : 0));
    }
}

INLINE void mxfp4_convert(F32, const uint32_t* __restrict x, uint32_t* __restrict y, int64_t count,
                          uint32_t field) {
    ToFP4InF32 to_fp4{int32_t(field)};
    int32_t vanish = vanishing(field);
    for (int64_t i = 0; i < count; i++) {
        int32_t a = int32_t(x[i] & 0x7FFFFFFF);
        y[i] = uint32_t(to_fp4(a)) | (a > vanish ? x[i] & 0x80000000u : 0u);
    }
}

INLINE void mxfp4_convert(F16, const uint16_t* __restrict x, uint16_t* __restrict y, int64_t count,
                          uint32_t field) {
    if (field >= 115 &&
        field <= 142) {  // a quarter of the scale is a normal number in fp16, and it is finite
        ToFP4InF16 to_fp4{int32_t(field) - 112};
        for (int64_t i = 0; i < count; i++) {
            int16_t a = int16_t(x[i] & 0x7FFF);
            y[i] = uint16_t(to_fp4(a) | (a > 0 ? x[i] & 0x8000 : 0));
        }
        return;
    }
    ToFP4InF32 to_fp4{int32_t(field)};
    int32_t vanish = vanishing(field);
    for (int64_t i = 0; i < count; i++) {
        int32_t a = int32_t(bits(F16::value(x[i])) & 0x7FFFFFFF);
        uint32_t r = uint32_t(to_fp4(a)), sign = a > vanish ? x[i] & 0x8000u : 0u;
        // Codes have two significant bits: only subnormal results round, by steps of 2^-24, the last place of
        // 0.5.
        uint32_t subnormal = bits(as_float(r) + 0.5f) - 0x3F000000u, normal = (r >> 13) - (112u << 10);
        uint32_t finite = int32_t(r) < (113 << 23) ? subnormal : normal;
        y[i] = uint16_t((int32_t(r) < (143 << 23) ? finite : 0x7C00u) | sign);
    }
}

template <class In>
INLINE void mxfp4_block(const typename In::Bits* x, typename In::Bits* y, int64_t count, uint32_t field) {
    if (field == 255)
        for (int64_t i = 0; i < count; i++) y[i] = In::nonfinite | In::nonfinite >> 1;  // a quiet NaN
    else
        mxfp4_convert(In(), x, y, count, field);
}

// Up to kMxfp4Blocks blocks of `block` elements, the last one perhaps shorter. By passes over all of them, so
// that no block waits for its scale; while one group is converted, the next is fetched from memory.
template <class In>
INLINE void mxfp4_group(const Mxfp4& q, const typename In::Bits* x, typename In::Bits* y, int64_t count,
                        int64_t block) {
    using Bits = typename In::Bits;
    constexpr int64_t line = 64 / sizeof(Bits);
    int64_t whole = count / block, rest = count % block, blocks = whole + (rest > 0);
    Bits amax[kMxfp4Blocks];
    uint32_t field[kMxfp4Blocks];
    for (int64_t b = 0; b < whole; b++) amax[b] = largest<In>(x + b * block, block);
    if (rest) amax[whole] = largest<In>(x + whole * block, rest);
    for (int64_t b = 0; b < blocks; b++)
        field[b] = amax[b] < In::nonfinite ? mxfp4_scale(In::value(amax[b]), q) : 255;
    for (int64_t b = 0; b < whole; b++) {
        int64_t at = b * block;
        for (int64_t i = at; i < at + block; i += line) {
            __builtin_prefetch(x + count + i);
            __builtin_prefetch(y + count + i, 1);
        }
        mxfp4_block<In>(x + at, y + at, block, field[b]);
    }
    if (rest) mxfp4_block<In>(x + whole * block, y + whole * block, rest, field[whole]);
}

template <class In>
void mxfp4_line(const Mxfp4& q, int64_t first, int64_t count) {
    auto* x = static_cast<const typename In::Bits*>(q.x) + first;
    auto* y = static_cast<typename In::Bits*>(q.y) + first;
    switch (q.block) {  // lengths that the compiler knows are faster
        case 16:
            return mxfp4_group<In>(q, x, y, count, 16);
        case 32:
            return mxfp4_group<In>(q, x, y, count, 32);
        case 64:
            return mxfp4_group<In>(q, x, y, count, 64);
        case 128:
            return mxfp4_group<In>(q, x, y, count, 128);
        default:
            return mxfp4_group<In>(q, x, y, count, q.block);
    }
}

void mxfp4_quant_dequant(const Mxfp4& q, int64_t first, int64_t count) {
    if (q.input == kBF16)
        mxfp4_line<BF16>(q, first, count);
    else if (q.input == kF16)
        mxfp4_line<F16>(q, first, count);
    else
        mxfp4_line<F32>(q, first, count);
}

}  // namespace
}  // namespace lowp
