// MX quantization of one task.

#pragma once

#include "formats.h"
#include "kernels.h"
#include "mx_quant_fp4.h"

namespace lowp {
namespace {

// The codec of an FP8 format: `scale_byte`, `encode_block` and `encode_columns` below. FP4 is its sibling.
template <class Out>
struct FP8 {
    static constexpr int per_byte = 1;
    explicit FP8(const Quant&) {}
};

// The scale byte for a block whose largest magnitude is `amax` (bit pattern of input type In).
template <class In, class Out>
uint8_t scale_byte(typename In::Bits amax, FP8<Out>, MxScaleRule rule) {
    float value = In::value(amax);
    int32_t byte;
    if (rule.alg == 0) {
        byte = max(int32_t(bits(value) >> 23) - Out::emax, 0);  // the exponent field is floor(log2) + 127
    } else {
        uint32_t s = bits(max(value, rule.low_bound) / as_float(Out::max_bits));
        uint32_t exponent = s >> 23, mantissa = s & 0x7FFFFF;
        bool up = exponent > 0 ? exponent < 254 && mantissa > 0 : mantissa > 0x400000;
        byte = int32_t(exponent + up);
    }
    return uint8_t(amax >= In::nonfinite ? 0xFF : byte);
}

// 2^(127 - byte) for a finite scale: never subnormal, because a finite amax gives bytes below 254.
float inverse(uint8_t byte) { return as_float(uint32_t(254 - byte) << 23); }

// Codes of `count` finite elements, each multiplied by its factor.
template <class In, class Out, class Factor>
INLINE void encode(const typename In::Bits* __restrict x, uint8_t* __restrict y, int64_t first, int64_t count,
                   const Factor& factor) {
    for (int64_t i = first; i < count; i++) {
        uint32_t u = bits(In::value(x[i]) * factor.at(i));
        uint32_t code = Out::encode(min(u & 0x7FFFFFFFu, Out::max_bits));
        y[i] = uint8_t((code << 24 | (u & 0x80000000u)) >> 24);
    }
}

// The same with two 16-bit elements in each 32-bit lane, which saves half the loads, signs and stores.
template <class In, class Out, class Factor>
INLINE void encode_pairs(const typename In::Bits* __restrict x, uint8_t* __restrict y, int64_t count,
                         const Factor& factor) {
    for (int64_t i = 0; i < count / 2; i++) {
        uint32_t u;
        memcpy(&u, x + 2 * i, sizeof u);
        uint32_t even = Out::encode(min(bits(In::low(u) * factor.even(i)), Out::max_bits));
        uint32_t odd = Out::encode(min(bits(In::high(u) * factor.odd(i)), Out::max_bits));
        uint32_t signs = u & 0x80008000u;
        uint16_t pair = uint16_t((even << 16 | odd << 24 | signs | signs << 8) >> 16);
        memcpy(y + 2 * i, &pair, sizeof pair);
    }
    encode<In, Out>(x, y, count / 2 * 2, count, factor);
}

template <class In, class Out, class Factor>
INLINE void encode_any(const typename In::Bits* x, uint8_t* y, int64_t count, const Factor& factor) {
    if constexpr (sizeof(typename In::Bits) == 2)
        encode_pairs<In, Out>(x, y, count, factor);
    else
        encode<In, Out>(x, y, 0, count, factor);
}

// Whether encode_bf16 can serve a block. Between these scale bytes the sums neither overflow nor depend on
// subnormals; a block of zeros is served with any scale.
constexpr uint8_t kLowest = 32, kHighest = 216;
bool ordinary(uint16_t amax, uint8_t byte) {  // in this form, for the usual case is one comparison then
    return (byte >= kLowest && byte <= kHighest) || (amax == 0 && byte <= kHighest);
}

// The bf16 that becomes Out's smallest normal number by an ordinary block's scale.
template <class Out>
int16_t lowest_normal(uint8_t byte) {
    return int16_t((max(byte, kLowest) + int32_t(Out::min_normal >> 23) - 127) << 7);
}

// lowest_normal of a block's elements: one for all, or one for each.
struct SameLowest {
    int16_t lowest;
    int16_t at(int64_t) const { return lowest; }
};

struct EachLowest {
    const int16_t* lowest;
    int16_t at(int64_t i) const { return lowest[i]; }
};

// Codes of kBlock bf16 elements of ordinary blocks. The sums are those of Out::encode without scaling: being
// by a power of two, it does not change how they round. So all but the sums is done in 16-bit lanes, twice as
// many to a register.
template <class Out, class Lowest>
INLINE void encode_bf16(const uint16_t* __restrict x, uint8_t* __restrict y, const Lowest& lowest) {
    constexpr int16_t span = int16_t((Out::max_bits - Out::min_normal) >> 16);
    int16_t magnitude[kBlock], addend[kBlock];
    uint16_t rest[kBlock];  // the sign and what the exponent contributes to the code, in the upper byte
    for (int64_t i = 0; i < kBlock; i++) {
        int16_t low = lowest.at(i), a = min(int16_t(x[i] & 0x7FFF), int16_t(low + span));
        int16_t p = max(int16_t(a & 0x7F80), low);
        magnitude[i] = a;
        addend[i] = int16_t(p + (Out::shift << 7));
        rest[i] = uint16_t((p - low) << (24 - Out::shift) | (x[i] & 0x8000));
    }
    for (int64_t i = 0; i < kBlock / 2; i++) {
        uint32_t a, p, r;
        memcpy(&a, magnitude + 2 * i, sizeof a);
        memcpy(&p, addend + 2 * i, sizeof p);
        memcpy(&r, rest + 2 * i, sizeof r);
        uint32_t even = bits(as_float(a << 16) + as_float(p << 16));
        uint32_t odd = bits(as_float(a & 0xFFFF0000u) + as_float(p & 0xFFFF0000u));
        uint16_t pair = uint16_t(((even << 16) + (odd << 24) + r + (r << 8)) >> 16);
        memcpy(y + 2 * i, &pair, sizeof pair);
    }
}

// The largest magnitude of `count` contiguous elements.
template <class In>
INLINE typename In::Bits largest(const typename In::Bits* x, int64_t count) {
    typename In::Bits amax = 0;
    for (int64_t i = 0; i < count; i++) amax = max<typename In::Bits>(amax, x[i] & In::magnitude);
    return amax;
}

// Raises the columns' largest magnitudes so far by one more row.
template <class In>
INLINE void raise(typename In::Bits* __restrict amax, const typename In::Bits* __restrict x, int64_t cols) {
    for (int64_t c = 0; c < cols; c++) amax[c] = max<typename In::Bits>(amax[c], x[c] & In::magnitude);
}

template <class In, class Out>
INLINE void encode_block(const typename In::Bits* x, uint8_t* y, int64_t count, typename In::Bits amax,
                         uint8_t byte, FP8<Out>) {
    if constexpr (is_bf16<In>) {
        if (count == kBlock && ordinary(amax, byte))
            return encode_bf16<Out>(x, y, SameLowest{lowest_normal<Out>(byte)});
    }
    if (byte == 0xFF)
        memset(y, 0, count);
    else
        encode_any<In, Out>(x, y, count, Same{inverse(byte)});
}

// Asks for a block of input and the place of its codes, to be in the cache when the next line is worked on.
// (The loop that finds the largest magnitudes waits for memory, which would idle while the codes are
// computed. Addresses beyond the tensor do no harm.)
template <class Bits>
INLINE void prefetch(const Bits* x, const uint8_t* y) {
    constexpr int64_t line = 64 / sizeof(Bits);
    for (int64_t i = 0; i < kBlock; i += line) __builtin_prefetch(x + i);
    __builtin_prefetch(y, 1);
}

// The largest magnitude of each `per_scale` blocks, for all of them.
template <class In>
void share_largest(typename In::Bits* amax, int64_t blocks, int64_t per_scale) {
    for (int64_t first = 0; first < blocks; first += per_scale) {
        int64_t last = min(first + per_scale, blocks);
        auto shared = largest<In>(amax + first, last - first);
        for (int64_t b = first; b < last; b++) amax[b] = shared;
    }
}

// Blocks along at most kChunk contiguous elements; the scales of an odd number of blocks are padded with 0.
// `per_scale` times kBlock elements share a scale. The line to be worked on next lies `ahead` elements on.
template <class In, class Codec>
void quant_line(const typename In::Bits* x, uint8_t* y, uint8_t* scale, int64_t count, int64_t ahead,
                int64_t per_scale, const Codec& codec, MxScaleRule rule) {
    int64_t whole = count / kBlock, rest = count % kBlock, blocks = whole + (rest > 0);
    typename In::Bits amax[kChunk / kBlock];
    for (int64_t b = 0; b < whole; b++) amax[b] = largest<In>(x + b * kBlock, kBlock);
    if (rest) amax[whole] = largest<In>(x + whole * kBlock, rest);
    if (per_scale > 1) share_largest<In>(amax, blocks, per_scale);
    uint8_t bytes[kChunk / kBlock];
    for (int64_t b = 0; b < blocks; b++) bytes[b] = scale_byte<In>(amax[b], codec, rule);
    int64_t scales = (blocks + per_scale - 1) / per_scale;
    if (per_scale == 1)
        memcpy(scale, bytes, blocks);
    else
        for (int64_t s = 0; s < scales; s++) scale[s] = bytes[s * per_scale];
    if (scales % 2) scale[scales] = 0;
    for (int64_t b = 0; b < whole; b++) {
        int64_t at = b * kBlock;
        prefetch(x + ahead + at, y + (ahead + at) / Codec::per_byte);
        encode_block<In>(x + at, y + at / Codec::per_byte, kBlock, amax[b], bytes[b], codec);
    }
    if (rest) {
        int64_t at = whole * kBlock;
        encode_block<In>(x + at, y + at / Codec::per_byte, rest, amax[whole], bytes[whole], codec);
    }
}

// One block's rows by at most kChunk columns, given the columns' largest magnitudes and scale bytes.
template <class In, class Out>
void encode_columns(const typename In::Bits* __restrict x, uint8_t* __restrict y, int64_t ld, int64_t rows,
                    int64_t cols, const typename In::Bits* __restrict amax, const uint8_t* __restrict bytes,
                    FP8<Out>) {
    uint8_t highest = 0;
    Each<kChunk> factors;
    for (int64_t c = 0; c < cols; c++) {
        highest = max(highest, bytes[c]);
        factors.all[c] = inverse(bytes[c]);
    }
    if constexpr (is_bf16<In>) {
        bool all = true;
        for (int64_t c = 0; c < cols; c++) all &= ordinary(amax[c], bytes[c]);
        if (all) {
            int64_t whole = cols / kBlock * kBlock;
            int16_t lowest[kChunk];
            for (int64_t c = 0; c < whole; c++) lowest[c] = lowest_normal<Out>(bytes[c]);
            for (int64_t r = 0; r < rows; r++) {
                for (int64_t c = 0; c < whole; c += kBlock)
                    encode_bf16<Out>(x + r * ld + c, y + r * ld + c, EachLowest{lowest + c});
                encode<In, Out>(x + r * ld, y + r * ld, whole, cols, factors);
            }
            return;
        }
    }
    factors.split(cols);
    for (int64_t r = 0; r < rows; r++) encode_any<In, Out>(x + r * ld, y + r * ld, cols, factors);
    if (highest == 0xFF) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < cols; c++) y[r * ld + c] = bytes[c] == 0xFF ? 0 : y[r * ld + c];
    }
}

// A line of a tile as `dynamic_block_mx_quant` takes it: without bf16 subnormals and what, scaled, is too
// small for bf16. (`line` is where a changed copy is put.)
template <class In>
INLINE const typename In::Bits* flushed(const typename In::Bits* x, int64_t count, uint8_t byte,
                                        typename In::Bits* line) {
    if constexpr (!is_bf16<In>) return x;
    int16_t least = max<int16_t>(0x7F, int16_t((byte - 134) * 128));
    for (int64_t i = 0; i < count; i++) {
        int16_t a = int16_t(x[i] & 0x7FFF);
        line[i] = typename In::Bits((x[i] & 0x8000) | (a > least ? a : 0));
    }
    return line;
}

template <class In, class Codec>
struct Run {
    using Bits = typename In::Bits;

    static void last(const Quant& q, int64_t first_row, int64_t last_row) {
        int64_t pair = 2 * q.block, scales = (q.n + pair - 1) / pair * 2, step = kChunk / pair * pair;
        Codec codec(q);
        for (int64_t r = first_row; r < last_row; r++)
            for (int64_t c = 0; c < q.n; c += step) {
                int64_t at = r * q.n + c, count = min(step, q.n - c);
                quant_line<In>(static_cast<const Bits*>(q.x) + at, q.y + at / Codec::per_byte,
                               q.scale + r * scales + c / q.block, count, count, q.block / kBlock, codec,
                               q.rule);
            }
    }

    // A pair's rows, by blocks (its halves). `line(r, at, cols)` is called for each row r, whose first column
    // is element `at`, before the columns of its block are quantized to y and scale.
    template <class Line>
    static void columns(const Quant& q, const RowPair& p, int64_t first_col, int64_t last_col, uint8_t* y,
                        uint8_t* scale, Line line) {
        const Bits* x = static_cast<const Bits*>(q.x);
        int64_t cols = last_col - first_col;
        Codec codec(q);
        scale += (p.scale_row * q.inner + first_col) * 2;
        for (int64_t half = 0; half * q.block < p.rows; half++) {
            int64_t first = p.row + half * q.block, rows = min(q.block, p.rows - half * q.block);
            Bits amax[kChunk];
            memset(amax, 0, sizeof(amax[0]) * cols);
            for (int64_t r = first; r < first + rows; r++) {
                int64_t at = r * q.inner + first_col;
                line(r, at, cols);
                raise<In>(amax, x + at, cols);
            }
            uint8_t bytes[kChunk];
            for (int64_t c = 0; c < cols; c++) bytes[c] = scale_byte<In>(amax[c], codec, q.rule);
            for (int64_t c = 0; c < cols; c++) scale[2 * c + half] = bytes[c];
            int64_t at = first * q.inner + first_col;
            encode_columns<In>(x + at, y + at / Codec::per_byte, q.inner, rows, cols, amax, bytes, codec);
        }
        if (p.rows <= q.block)  // no second block: its scales are padding
            for (int64_t c = 0; c < cols; c++) scale[2 * c + 1] = 0;
    }

    static void rows(const Quant& q, const RowPair& p, int64_t first_col, int64_t last_col) {
        columns(q, p, first_col, last_col, q.y, q.scale, [](int64_t, int64_t, int64_t) {});
    }

    // Both axes of a block of rows while it is in the cache.
    static void dual(const Quant& q, const RowPair& p, int64_t first_col, int64_t last_col) {
        int64_t scales = (q.inner + kPair - 1) / kPair * 2;
        Codec codec(q);
        columns(q, p, first_col, last_col, q.y2, q.scale2, [&](int64_t r, int64_t at, int64_t cols) {
            quant_line<In>(static_cast<const Bits*>(q.x) + at, q.y + at / Codec::per_byte,
                           q.scale + r * scales + first_col / kBlock, cols, q.inner, 1, codec, q.rule);
        });
    }

    // One scale for each kBlock x kBlock tile.
    static void tiles(const Quant& q, const RowPair& p, int64_t first_col, int64_t last_col) {
        const Bits* x = static_cast<const Bits*>(q.x);
        int64_t cols = last_col - first_col, blocks = (cols + kBlock - 1) / kBlock;
        int64_t scales = (q.inner + kPair - 1) / kPair * 2;
        Codec codec(q);
        uint8_t* scale2 = q.scale2 + (p.scale_row * q.inner + first_col) * 2;
        for (int64_t half = 0; half * kBlock < p.rows; half++) {
            int64_t first = p.row + half * kBlock, last = min(first + kBlock, p.row + p.rows);
            Bits amax[kChunk];
            memset(amax, 0, sizeof(amax[0]) * cols);
            for (int64_t r = first; r < last; r++) raise<In>(amax, x + r * q.inner + first_col, cols);
            uint8_t bytes[kChunk / kBlock + 1];
            for (int64_t b = 0; b < blocks; b++) {
                amax[b] = largest<In>(amax + b * kBlock, min(kBlock, cols - b * kBlock));
                bytes[b] = scale_byte<In>(amax[b], codec, q.rule);
            }
            bytes[blocks] = 0;
            for (int64_t c = 0; c < cols; c++) scale2[2 * c + half] = bytes[c / kBlock];
            for (int64_t r = first; r < last; r++) {
                memcpy(q.scale + r * scales + first_col / kBlock, bytes, (blocks + 1) / 2 * 2);
                for (int64_t b = 0; b < blocks; b++) {
                    int64_t at = r * q.inner + first_col + b * kBlock, count = min(kBlock, cols - b * kBlock);
                    Bits line[kBlock];
                    encode_block<In>(flushed<In>(x + at, count, bytes[b], line), q.y + at / Codec::per_byte,
                                     count, amax[b], bytes[b], codec);
                }
            }
        }
        if (p.rows <= kBlock)
            for (int64_t c = 0; c < cols; c++) scale2[2 * c + 1] = 0;
    }
};

// Calls f with the Run of the tensor's input and element types.
template <class In, class F>
void select_format(const Quant& q, F f) {
    if (q.format == kE4M3)
        f(Run<In, FP8<E4M3>>());
    else if (q.format == kE5M2)
        f(Run<In, FP8<E5M2>>());
    else
        f(Run<In, FP4>());
}

template <class F>
void select_16_bit(const Quant& q, F f) {
    if (q.input == kBF16)
        select_format<BF16>(q, f);
    else
        select_format<F16>(q, f);
}

template <class F>
void select(const Quant& q, F f) {
    if (q.input == kF32)
        select_format<F32>(q, f);
    else
        select_16_bit(q, f);
}

void quant_last(const Quant& q, int64_t first_row, int64_t last_row) {
    select(q, [&](auto run) { run.last(q, first_row, last_row); });
}

void quant_rows(const Quant& q, const RowPair& p, int64_t first_col, int64_t last_col) {
    select(q, [&](auto run) { run.rows(q, p, first_col, last_col); });
}

void quant_dual(const Quant& q, const RowPair& p, int64_t first_col, int64_t last_col) {
    select_16_bit(q, [&](auto run) { run.dual(q, p, first_col, last_col); });
}

void quant_tiles(const Quant& q, const RowPair& p, int64_t first_col, int64_t last_col) {
    select_16_bit(q, [&](auto run) { run.tiles(q, p, first_col, last_col); });
}

}  // namespace
}  // namespace lowp
