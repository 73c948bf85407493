// MX quantization of one task.

#pragma once

#include "formats.h"
#include "kernels.h"

namespace lowp {
namespace {

// The scale byte for a block whose largest magnitude is `amax` (bit pattern of input type In).
template <class In, class Out>
uint8_t scale_byte(typename In::Bits amax, int alg) {
    float value = In::value(amax);
    int32_t byte;
    if (alg == 0) {
        byte = max(int32_t(bits(value) >> 23) - Out::emax, 0);  // the exponent field is floor(log2) + 127
    } else {
        uint32_t s = bits(value / as_float(Out::max_bits));
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

// The largest magnitude of `count` contiguous elements.
template <class In>
INLINE typename In::Bits largest(const typename In::Bits* x, int64_t count) {
    typename In::Bits amax = 0;
    for (int64_t i = 0; i < count; i++) amax = max<typename In::Bits>(amax, x[i] & In::magnitude);
    return amax;
}

template <class In, class Out>
INLINE void encode_block(const typename In::Bits* x, uint8_t* y, int64_t count, uint8_t byte) {
    if (byte == 0xFF)
        memset(y, 0, count);
    else
        encode_any<In, Out>(x, y, count, Same{inverse(byte)});
}

// Blocks along at most kChunk contiguous elements; the scales of an odd number of blocks are padded with 0.
template <class In, class Out>
void quant_line(const typename In::Bits* x, uint8_t* y, uint8_t* scale, int64_t count, int alg) {
    int64_t whole = count / kBlock, rest = count % kBlock, blocks = whole + (rest > 0);
    typename In::Bits amax[kChunk / kBlock];
    for (int64_t b = 0; b < whole; b++) amax[b] = largest<In>(x + b * kBlock, kBlock);
    if (rest) amax[whole] = largest<In>(x + whole * kBlock, rest);
    for (int64_t b = 0; b < blocks; b++) scale[b] = scale_byte<In, Out>(amax[b], alg);
    if (blocks % 2) scale[blocks] = 0;
    for (int64_t b = 0; b < whole; b++)
        encode_block<In, Out>(x + b * kBlock, y + b * kBlock, kBlock, scale[b]);
    if (rest) encode_block<In, Out>(x + whole * kBlock, y + whole * kBlock, rest, scale[whole]);
}

// At most 32 rows by kChunk columns, blocks along the rows. Scales go to every other byte.
template <class In, class Out>
void quant_columns(const typename In::Bits* __restrict x, uint8_t* __restrict y, int64_t ld, int64_t rows,
                   int64_t cols, uint8_t* scale, int alg) {
    typename In::Bits amax[kChunk];
    Each<kChunk> factors;
    memset(amax, 0, sizeof(amax[0]) * cols);
    for (int64_t r = 0; r < rows; r++) {
        const typename In::Bits* line = x + r * ld;
        for (int64_t c = 0; c < cols; c++) amax[c] = max<typename In::Bits>(amax[c], line[c] & In::magnitude);
    }
    uint8_t bytes[kChunk];
    for (int64_t c = 0; c < cols; c++) bytes[c] = scale_byte<In, Out>(amax[c], alg);
    uint8_t highest = 0;
    for (int64_t c = 0; c < cols; c++) {
        scale[2 * c] = bytes[c];
        highest = max(highest, bytes[c]);
        factors.all[c] = inverse(bytes[c]);
    }
    factors.split(cols);
    for (int64_t r = 0; r < rows; r++) encode_any<In, Out>(x + r * ld, y + r * ld, cols, factors);
    if (highest == 0xFF) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < cols; c++) y[r * ld + c] = bytes[c] == 0xFF ? 0 : y[r * ld + c];
    }
}

template <class In, class Out>
struct Run {
    using Bits = typename In::Bits;

    static void last(const Quant& q, int64_t first_row, int64_t last_row) {
        int64_t scales = (q.n + kPair - 1) / kPair * 2;
        for (int64_t r = first_row; r < last_row; r++)
            for (int64_t c = 0; c < q.n; c += kChunk) {
                int64_t at = r * q.n + c;
                quant_line<In, Out>(static_cast<const Bits*>(q.x) + at, q.y + at,
                                    q.scale + r * scales + c / kBlock, min(kChunk, q.n - c), q.scale_alg);
            }
    }

    // One block (half of a pair) of rows. Where there is no second one, its scales are written as padding.
    static void columns(const Quant& q, const RowPair& p, int64_t half, int64_t col, int64_t cols) {
        int64_t rows = min(kBlock, p.rows - half * kBlock), at = (p.row + half * kBlock) * q.inner + col;
        uint8_t* scale = q.scale + (p.scale_row * q.inner + col) * 2;
        quant_columns<In, Out>(static_cast<const Bits*>(q.x) + at, q.y + at, q.inner, rows, cols,
                               scale + half, q.scale_alg);
        if (p.rows <= kBlock)
            for (int64_t c = 0; c < cols; c++) scale[2 * c + 1] = 0;
    }

    static void rows(const Quant& q, const RowPair& p, int64_t first_col, int64_t last_col) {
        for (int64_t half = 0; half * kBlock < p.rows; half++)
            columns(q, p, half, first_col, last_col - first_col);
    }

    // Both axes of a block of rows while it is in the cache.
    static void dual(const Quant& q, const RowPair& p, int64_t first_col, int64_t last_col) {
        Quant second = q;
        second.y = q.y2;
        second.scale = q.scale2;
        int64_t scales = (q.inner + kPair - 1) / kPair * 2, cols = last_col - first_col;
        for (int64_t half = 0; half * kBlock < p.rows; half++) {
            int64_t first = p.row + half * kBlock, last = first + min(kBlock, p.rows - half * kBlock);
            for (int64_t r = first; r < last; r++) {
                int64_t at = r * q.inner + first_col;
                quant_line<In, Out>(static_cast<const Bits*>(q.x) + at, q.y + at,
                                    q.scale + r * scales + first_col / kBlock, cols, q.scale_alg);
            }
            columns(second, p, half, first_col, cols);
        }
    }
};

// Calls f with the Run of the tensor's input and element types.
template <class F>
void select(const Quant& q, F f) {
    if (q.format == kE4M3) {
        if (q.input == kBF16)
            f(Run<BF16, E4M3>());
        else if (q.input == kF16)
            f(Run<F16, E4M3>());
        else
            f(Run<F32, E4M3>());
    } else {
        if (q.input == kBF16)
            f(Run<BF16, E5M2>());
        else if (q.input == kF16)
            f(Run<F16, E5M2>());
        else
            f(Run<F32, E5M2>());
    }
}

void quant_last(const Quant& q, int64_t first_row, int64_t last_row) {
    select(q, [&](auto run) { run.last(q, first_row, last_row); });
}

void quant_rows(const Quant& q, const RowPair& p, int64_t first_col, int64_t last_col) {
    select(q, [&](auto run) { run.rows(q, p, first_col, last_col); });
}

void quant_dual(const Quant& q, const RowPair& p, int64_t first_col, int64_t last_col) {
    select(q, [&](auto run) { run.dual(q, p, first_col, last_col); });
}

}  // namespace
}  // namespace lowp
