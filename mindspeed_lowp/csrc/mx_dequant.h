// MX dequantization of one task.

#pragma once

#include "formats.h"
#include "kernels.h"

namespace lowp {
namespace {

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
INLINE void decode(const uint8_t* __restrict codes, T* __restrict out, int64_t first, int64_t count,
                   const Factor& factor) {
    for (int64_t i = first; i < count; i++)
        store(Format::decode(uint32_t(codes[i]) << 24) * factor.at(i), out + i);
}

// The same for values that are exact in bf16, two in each 32-bit lane.
template <class Format, class Factor>
INLINE void decode_pairs(const uint8_t* __restrict codes, uint16_t* __restrict out, int64_t count,
                         const Factor& factor) {
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
INLINE void decode_line(const uint8_t* codes, T* out, int64_t count, const Factor& factor, bool exact) {
    if constexpr (sizeof(T) == 2) {
        if (exact)
            decode_pairs<Format>(codes, out, count, factor);
        else
            decode<Format>(codes, out, 0, count, factor);
    } else {
        decode<Format>(codes, out, 0, count, factor);
    }
    uint8_t highest = 0;
    for (int64_t i = 0; i < count; i++) highest = max<uint8_t>(highest, codes[i] & 0x7F);
    if (highest < Format::special) return;
    for (int64_t i = 0; i < count; i++)
        if ((codes[i] & 0x7F) >= Format::special)
            store(Format::decode_special(codes[i]) * factor.at(i), out + i);
}

constexpr int64_t kTile = 128;  // columns decoded at a time; a multiple of kBlock

// Codes of a tile of the output, row by row, from a matrix whose columns are contiguous.
void transpose_tile(const uint8_t* codes, int64_t col_stride, int64_t rows, int64_t cols,
                    uint8_t* __restrict tile) {
    int64_t col = 0;
    for (; rows == kBlock && col + 8 <= cols; col += 8) {
        // 8 columns of 32 bytes, as 8 x 8 bytes in 64-bit words: swap bytes, then pairs, then halves across
        // words.
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

// E4M3 codes of the two FP4 codes in each byte.
struct Unpacker {
    uint16_t pairs[256];

    explicit Unpacker(int format) {
        const uint8_t* same = format == kE2M1 ? kE2M1AsE4M3 : kE1M2AsE4M3;
        auto code = [&](int fp4) { return same[fp4 & 7] | (fp4 & 8) << 4; };
        for (int byte = 0; byte < 256; byte++) pairs[byte] = uint16_t(code(byte & 15) | code(byte >> 4) << 8);
    }

    void line(const uint8_t* __restrict packed, int64_t count, uint8_t* __restrict codes) const {
        for (int64_t i = 0; i < count / 2; i++) memcpy(codes + 2 * i, &pairs[packed[i]], 2);
    }

    // At most kBlock rows by kTile columns to a tile of the output.
    void tile(const Dequant& d, const uint8_t* packed, int64_t row, int64_t rows, int64_t col, int64_t cols,
              uint8_t* tile) const {
        if (d.packed_axis == 1) {
            for (int64_t r = 0; r < rows; r++)
                line(packed + (row + r) * d.row_stride + col / 2, cols, tile + r * kTile);
            return;
        }
        uint8_t columns[kTile * kBlock];
        for (int64_t c = 0; c < cols; c++)
            line(packed + row / 2 + (col + c) * d.col_stride, rows, columns + c * kBlock);
        transpose_tile(columns, kBlock, rows, cols, tile);
    }
};

// At most kBlock rows, beginning with a block's first, by kTile columns.
template <class Format, class T>
void dequant_tile(const Dequant& d, const uint8_t* codes, int64_t ld, const uint8_t* scale, int64_t row,
                  int64_t rows, int64_t col, int64_t cols, T* out) {
    if (d.axis == 0) {
        Each<kTile> factors;
        const uint8_t* s =
            scale + row / kPair * d.scale_pair + row / kBlock % 2 * d.scale_byte + col * d.scale_line;
        uint8_t lowest = 0xFF;
        for (int64_t c = 0; c < cols; c++) {
            uint8_t byte = s[c * d.scale_line];
            lowest = min(lowest, byte);
            factors.all[c] = scale_value(byte);
        }
        factors.split(cols);
        for (int64_t r = 0; r < rows; r++)
            decode_line<Format>(codes + r * ld, out + r * d.cols, cols, factors, lowest >= kExactInBF16);
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
            if (cols - c >= kBlock)
                decode_line<Format>(line, to, kBlock, factor, byte >= kExactInBF16);
            else
                decode_line<Format>(line, to, cols - c, factor, byte >= kExactInBF16);
        }
    }
}

// `unpacker` of FP4 codes, which become E4M3's; null for FP8.
template <class Format, class T>
void dequant_typed(const Dequant& d, const Unpacker* unpacker, int64_t batch, int64_t first_row,
                   int64_t last_row, int64_t first_col, int64_t last_col) {
    const uint8_t* codes = d.codes + batch * d.batch_stride;
    const uint8_t* scale = d.scale + batch * d.scale_batch;
    T* out = static_cast<T*>(d.out) + batch * d.rows * d.cols;
    uint8_t tile[kBlock * kTile];
    for (int64_t row = first_row; row < last_row; row += kBlock) {
        int64_t rows = min(kBlock, last_row - row);
        for (int64_t col = first_col; col < last_col; col += kTile) {
            int64_t cols = min(kTile, last_col - col), ld = d.row_stride;
            const uint8_t* from = codes + row * d.row_stride + col * d.col_stride;
            if (unpacker) {
                unpacker->tile(d, codes, row, rows, col, cols, tile);
                from = tile;
                ld = kTile;
            } else if (d.col_stride != 1) {
                transpose_tile(from, d.col_stride, rows, cols, tile);
                from = tile;
                ld = kTile;
            }
            dequant_tile<Format>(d, from, ld, scale, row, rows, col, cols, out + row * d.cols + col);
        }
    }
}

template <class Format, class... Args>
void dequant_format(const Dequant& d, Args... args) {
    if (d.output == kBF16)
        dequant_typed<Format, uint16_t>(d, args...);
    else
        dequant_typed<Format, float>(d, args...);
}

void dequant(const Dequant& d, int64_t batch, int64_t first_row, int64_t last_row, int64_t first_col,
             int64_t last_col) {
    if (d.format == kE5M2) {
        dequant_format<E5M2>(d, nullptr, batch, first_row, last_row, first_col, last_col);
    } else if (d.format == kE4M3) {
        dequant_format<E4M3>(d, nullptr, batch, first_row, last_row, first_col, last_col);
    } else {
        Unpacker unpacker(d.format);
        dequant_format<E4M3>(d, &unpacker, batch, first_row, last_row, first_col, last_col);
    }
}

}  // namespace
}  // namespace lowp
