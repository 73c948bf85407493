// MX quantization and dequantization of one task, written as plain loops that compilers vectorize.
//
// Compiled several times with LOWP_LEVEL = base, v3, v4. Everything here is static and nothing from the C++ library is
// instantiated: a weak symbol compiled for AVX-512 must not be picked by the linker for the base level.

#include "kernels.h"

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
    static float low(uint32_t pair) { return as_float(pair << 16 & 0x7FFF0000u); }  // magnitudes of two neighbours
    static float high(uint32_t pair) { return as_float(pair & 0x7FFF0000u); }
};

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
    static constexpr uint32_t max_bits = MaxBits;                  // of the largest value, as fp32
    static constexpr uint32_t min_normal = uint32_t(128 - Bias) << 23;  // as fp32
    static constexpr uint32_t special = Special;                   // codes from here on are Inf or NaN
    static constexpr uint32_t smallest = uint32_t(127 + 1 - Bias - M) << 23;  // smallest subnormal, as fp32

    // A word whose low 16 bits are the code of a finite magnitude (fp32 bits, not above max_bits), rounded to nearest
    // even.
    //
    // With p the power of two below the magnitude (at least the smallest normal), adding 2^(23 - M) p makes the last
    // bit of the sum worth one step of the format, so that the FPU rounds and the low bits count steps, subnormal or
    // not. What p's exponent contributes to the code is put there before the addition.
    static uint32_t encode(uint32_t a) {
        uint32_t p = max(a & 0x7F800000u, min_normal);
        uint32_t addend = p + (p >> shift) + ((uint32_t(shift) << 23) - (min_normal >> shift));
        return bits(as_float(a) + as_float(addend));
    }

    // The value of a code in the top byte of a word, if it is finite. (Work at the top of 32-bit lanes keeps compilers
    // from narrowing them in mid-course, which costs more in packing than it saves.)
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

// Factors of the elements: one for all, or one for each (even and odd elements apart, as they are used).
struct Same {
    float factor;
    float even(int64_t) const { return factor; }
    float odd(int64_t) const { return factor; }
    float at(int64_t) const { return factor; }
};

struct Each {
    const float *evens, *odds, *all;
    float even(int64_t i) const { return evens[i]; }
    float odd(int64_t i) const { return odds[i]; }
    float at(int64_t i) const { return all[i]; }
};

// Codes of `count` finite elements, each multiplied by its factor.
template <class In, class Out, class Factor>
INLINE void encode(const typename In::Bits* __restrict x, uint8_t* __restrict y, int64_t first, int64_t count,
                   Factor factor) {
    for (int64_t i = first; i < count; i++) {
        uint32_t u = bits(In::value(x[i]) * factor.at(i));
        uint32_t code = Out::encode(min(u & 0x7FFFFFFFu, Out::max_bits));
        y[i] = uint8_t((code << 24 | (u & 0x80000000u)) >> 24);
    }
}

// The same with two 16-bit elements in each 32-bit lane, which saves half the loads, signs and stores.
template <class In, class Out, class Factor>
INLINE void encode_pairs(const typename In::Bits* __restrict x, uint8_t* __restrict y, int64_t count, Factor factor) {
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
INLINE void encode_any(const typename In::Bits* x, uint8_t* y, int64_t count, Factor factor) {
    if constexpr (sizeof(typename In::Bits) == 2) encode_pairs<In, Out>(x, y, count, factor);
    else encode<In, Out>(x, y, 0, count, factor);
}

// One block of `count` contiguous elements.
template <class In, class Out>
INLINE uint8_t quant_block(const typename In::Bits* x, uint8_t* y, int64_t count, int alg) {
    typename In::Bits amax = 0;
    for (int64_t i = 0; i < count; i++) amax = max<typename In::Bits>(amax, x[i] & In::magnitude);
    uint8_t byte = scale_byte<In, Out>(amax, alg);
    if (byte == 0xFF) memset(y, 0, count);
    else encode_any<In, Out>(x, y, count, Same{inverse(byte)});
    return byte;
}

// Blocks along `count` contiguous elements; the scales of an odd number of blocks are padded with 0.
template <class In, class Out>
void quant_line(const typename In::Bits* x, uint8_t* y, uint8_t* scale, int64_t count, int alg) {
    int64_t whole = count / kBlock, rest = count % kBlock;
    for (int64_t b = 0; b < whole; b++) scale[b] = quant_block<In, Out>(x + b * kBlock, y + b * kBlock, kBlock, alg);
    int64_t blocks = whole;
    if (rest) scale[blocks++] = quant_block<In, Out>(x + whole * kBlock, y + whole * kBlock, rest, alg);
    if (blocks % 2) scale[blocks] = 0;
}

// `rows` (at most 32) rows by `cols` (at most kChunk) columns, blocks along the rows. Scales go to every other byte.
template <class In, class Out>
void quant_columns(const typename In::Bits* __restrict x, uint8_t* __restrict y, int64_t ld, int64_t rows, int64_t cols, uint8_t* scale,
                   int alg) {
    typename In::Bits amax[kChunk];
    float factors[kChunk], evens[kChunk / 2], odds[kChunk / 2];
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
        factors[c] = inverse(bytes[c]);
    }
    for (int64_t i = 0; i < cols / 2; i++) {
        evens[i] = factors[2 * i];
        odds[i] = factors[2 * i + 1];
    }
    for (int64_t r = 0; r < rows; r++) {
        encode_any<In, Out>(x + r * ld, y + r * ld, cols, Each{evens, odds, factors});
    }
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
            quant_line<In, Out>(static_cast<const Bits*>(q.x) + r * q.n, q.y + r * q.n, q.scale + r * scales, q.n,
                                q.scale_alg);
    }

    // One block (half of a pair) of rows; the last half of a pair also writes the padding of a missing second one.
    static void columns(const Quant& q, const RowPair& p, int64_t half, int64_t col, int64_t cols) {
        int64_t rows = min(kBlock, p.rows - half * kBlock), at = (p.row + half * kBlock) * q.inner + col;
        uint8_t* scale = q.scale + (p.scale_row * q.inner + col) * 2;
        quant_columns<In, Out>(static_cast<const Bits*>(q.x) + at, q.y + at, q.inner, rows, cols, scale + half,
                               q.scale_alg);
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

template <template <class, class> class R, class F>
void select(const Quant& q, F f) {
    if (q.format == kE4M3) {
        if (q.input == kBF16) f(R<BF16, E4M3>());
        else if (q.input == kF16) f(R<F16, E4M3>());
        else f(R<F32, E4M3>());
    } else {
        if (q.input == kBF16) f(R<BF16, E5M2>());
        else if (q.input == kF16) f(R<F16, E5M2>());
        else f(R<F32, E5M2>());
    }
}

void quant_last(const Quant& q, int64_t first_row, int64_t last_row) {
    select<Run>(q, [&](auto run) { run.last(q, first_row, last_row); });
}

void quant_rows(const Quant& q, const RowPair& p, int64_t first_col, int64_t last_col) {
    select<Run>(q, [&](auto run) { run.rows(q, p, first_col, last_col); });
}

void quant_dual(const Quant& q, const RowPair& p, int64_t first_col, int64_t last_col) {
    select<Run>(q, [&](auto run) { run.dual(q, p, first_col, last_col); });
}

// An E8M0 scale as fp32; 2^-127 is subnormal there.
float scale_value(uint8_t byte) {
    uint32_t u = byte == 0 ? 0x00400000u : uint32_t(byte) << 23;
    return as_float(byte == 0xFF ? 0x7FC00000u : u);
}

// From this scale on, no value is a bf16 subnormal: all are exact in bf16.
constexpr uint8_t kExactInBF16 = 127 - 126 + 16;

void store(float v, float* out) { *out = v; }

void store(float v, uint16_t* out) {  // bf16, rounded to nearest even; NaN has no low bits set here
    uint32_t u = bits(v);
    *out = uint16_t((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

template <class Format, class T, class Factor>
INLINE void decode(const uint8_t* __restrict codes, T* __restrict out, int64_t first, int64_t count, Factor factor) {
    for (int64_t i = first; i < count; i++) store(Format::decode(uint32_t(codes[i]) << 24) * factor.at(i), out + i);
}

// The same for values that are exact in bf16, two in each 32-bit lane.
template <class Format, class Factor>
INLINE void decode_pairs(const uint8_t* __restrict codes, uint16_t* __restrict out, int64_t count, Factor factor) {
    for (int64_t i = 0; i < count / 2; i++) {
        uint16_t pair;
        memcpy(&pair, codes + 2 * i, sizeof pair);
        uint32_t even = bits(Format::decode(uint32_t(pair) << 24) * factor.even(i));
        uint32_t odd = bits(Format::decode(uint32_t(pair) << 16) * factor.odd(i));
        uint32_t both = even >> 16 | (odd & 0xFFFF0000u);
        memcpy(out + 2 * i, &both, sizeof both);
    }
    decode<Format>(codes, out, count / 2 * 2, count, factor);
}

template <class Format, class T, class Factor>
INLINE void decode_line(const uint8_t* codes, T* out, int64_t count, Factor factor, bool exact) {
    if constexpr (sizeof(T) == 2) {
        if (exact) decode_pairs<Format>(codes, out, count, factor);
        else decode<Format>(codes, out, 0, count, factor);
    } else {
        decode<Format>(codes, out, 0, count, factor);
    }
    uint8_t highest = 0;
    for (int64_t i = 0; i < count; i++) highest = max<uint8_t>(highest, codes[i] & 0x7F);
    if (highest < Format::special) return;
    for (int64_t i = 0; i < count; i++)
        if ((codes[i] & 0x7F) >= Format::special) store(Format::decode_special(codes[i]) * factor.at(i), out + i);
}

constexpr int64_t kTile = 128;  // columns decoded at a time; a multiple of kBlock

// Codes of a tile of the output, row by row, from a matrix whose columns are contiguous.
void transpose_tile(const uint8_t* codes, int64_t col_stride, int64_t rows, int64_t cols, uint8_t* __restrict tile) {
    int64_t col = 0;
    for (; rows == kBlock && col + 8 <= cols; col += 8) {
        // 8 columns of 32 bytes, as 8 x 8 bytes in 64-bit words: swap bytes, then pairs, then halves across words.
        for (int64_t group = 0; group < kBlock / 8; group++) {
            uint64_t w[8];
            for (int i = 0; i < 8; i++) memcpy(&w[i], codes + (col + i) * col_stride + 8 * group, 8);
            auto swap = [&](int i, int j, int shift, uint64_t mask) {
                uint64_t t = (w[i] >> shift ^ w[j]) & mask;
                w[j] ^= t;
                w[i] ^= t << shift;
            };
            for (int i = 0; i < 8; i += 2) swap(i, i + 1, 8, 0x00FF00FF00FF00FFu);
            for (int i = 0; i < 8; i += 4)
                for (int j = i; j < i + 2; j++) swap(j, j + 2, 16, 0x0000FFFF0000FFFFu);
            for (int i = 0; i < 4; i++) swap(i, i + 4, 32, 0x00000000FFFFFFFFu);
            for (int i = 0; i < 8; i++) memcpy(tile + (8 * group + i) * kTile + col, &w[i], 8);
        }
    }
    for (; col < cols; col++)
        for (int64_t r = 0; r < rows; r++) tile[r * kTile + col] = codes[col * col_stride + r];
}

// At most kBlock rows, beginning with a block's first, by kTile columns.
template <class Format, class T>
void dequant_tile(const Dequant& d, const uint8_t* codes, int64_t ld, const uint8_t* scale, int64_t row, int64_t rows,
                  int64_t col, int64_t cols, T* out) {
    if (d.axis == 0) {
        float factors[kTile], evens[kTile / 2], odds[kTile / 2];
        const uint8_t* s = scale + row / kPair * d.scale_pair + row / kBlock % 2 * d.scale_byte + col * d.scale_line;
        uint8_t lowest = 0xFF;
        for (int64_t c = 0; c < cols; c++) {
            uint8_t byte = s[c * d.scale_line];
            lowest = min(lowest, byte);
            factors[c] = scale_value(byte);
        }
        for (int64_t i = 0; i < cols / 2; i++) {
            evens[i] = factors[2 * i];
            odds[i] = factors[2 * i + 1];
        }
        for (int64_t r = 0; r < rows; r++)
            decode_line<Format>(codes + r * ld, out + r * d.cols, cols, Each{evens, odds, factors},
                                lowest >= kExactInBF16);
        return;
    }
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t* s = scale + (row + r) * d.scale_line;
        for (int64_t c = 0; c < cols; c += kBlock) {
            int64_t block = (col + c) / kBlock;
            uint8_t byte = s[block / 2 * d.scale_pair + block % 2 * d.scale_byte];
            const uint8_t* line = codes + r * ld + c;
            T* to = out + r * d.cols + c;
            Same factor{scale_value(byte)};
            if (cols - c >= kBlock) decode_line<Format>(line, to, kBlock, factor, byte >= kExactInBF16);
            else decode_line<Format>(line, to, cols - c, factor, byte >= kExactInBF16);
        }
    }
}

template <class Format, class T>
void dequant_typed(const Dequant& d, int64_t batch, int64_t first_row, int64_t last_row, int64_t first_col,
                   int64_t last_col) {
    const uint8_t* codes = d.codes + batch * d.batch_stride;
    const uint8_t* scale = d.scale + batch * d.scale_batch;
    T* out = static_cast<T*>(d.out) + batch * d.rows * d.cols;
    uint8_t tile[kBlock * kTile];
    for (int64_t row = first_row; row < last_row; row += kBlock) {
        int64_t rows = min(kBlock, last_row - row);
        for (int64_t col = first_col; col < last_col; col += kTile) {
            int64_t cols = min(kTile, last_col - col), ld = d.row_stride;
            const uint8_t* from = codes + row * d.row_stride + col * d.col_stride;
            if (d.col_stride != 1) {
                transpose_tile(from, d.col_stride, rows, cols, tile);
                from = tile;
                ld = kTile;
            }
            dequant_tile<Format>(d, from, ld, scale, row, rows, col, cols, out + row * d.cols + col);
        }
    }
}

void dequant(const Dequant& d, int64_t batch, int64_t first_row, int64_t last_row, int64_t first_col,
             int64_t last_col) {
    auto* f = d.format == kE4M3 ? (d.output == kBF16 ? dequant_typed<E4M3, uint16_t> : dequant_typed<E4M3, float>)
                                : (d.output == kBF16 ? dequant_typed<E5M2, uint16_t> : dequant_typed<E5M2, float>);
    f(d, batch, first_row, last_row, first_col, last_col);
}

}  // namespace

#define LOWP_JOIN_(a, b) a##b
#define LOWP_JOIN(a, b) LOWP_JOIN_(a, b)
const Kernels LOWP_JOIN(kernels_, LOWP_LEVEL) = {quant_last, quant_rows, quant_dual, dequant};

}  // namespace lowp
