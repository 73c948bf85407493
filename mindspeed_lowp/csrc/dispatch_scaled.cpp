// The C interface of quantization with fp32 scales.

#include <atomic>
#include <cstring>

#include "dispatch.h"

namespace lowp {
namespace {

// How a scale follows from the largest magnitude: amax / largest or amax times the reciprocal of largest
// (they round differently), not above `most`.
struct AmaxScale {
    float largest, most;
    int by_reciprocal;

    float operator()(uint32_t amax) const {
        float value, quiet = __builtin_nanf("");
        memcpy(&value, &amax, sizeof value);
        float scale = by_reciprocal ? value * (1.0f / largest) : value / largest;
        return scale != scale ? quiet : std::min(scale, most);
    }
};

// The elements of one call.
struct Elements {
    const void* x;
    uint8_t* y;
    int input, format;
};

// One value for every column of a line.
struct Filled {
    float value[kLine];
    explicit Filled(float v) { std::fill(value, value + kLine, v); }
};

// Codes of one line of x * factor / scale.
void encode_products(const Elements& e, int64_t first, int64_t cols, const float* factor, float scale) {
    Filled scales(scale), none(-0.0f);  // which changes nothing it is added to
    for (int64_t c = 0; c < cols; c += kLine) {
        Tile segment{first + c, 1, std::min(kLine, cols - c), cols};
        active->scaled.encode_each(e.x, e.y, segment, factor + c, scales.value, none.value, 1, e.input,
                                   e.format);
    }
}

// Codes of x [n] under one scale. Many 16-bit elements are looked up among the codes of all 65536 patterns.
void encode_all(const Elements& e, int64_t n, float scale, int threads) {
    if (e.input == kF32 || n < 8 * 0x10000) {
        return parallel(n, n, threads, [&](int64_t first, int64_t last) {
            active->scaled.encode(e.x, e.y, Tile{first, 1, last - first, n}, scale, e.input, e.format);
        });
    }
    std::vector<uint8_t> table(0x10000);
    active->scaled.tabulate(table.data(), scale, e.input, e.format);
    parallel(n, n, threads, [&](int64_t first, int64_t last) {
        active->scaled.look_up(e.x, e.y, table.data(), first, last);
    });
}

// The rows' factors: those of the group that a row belongs to.
struct Smooth {
    const float* factor;  // [groups, cols], or null
    const int64_t* ends;  // [groups]
    int64_t cols;

    const float* of_row(int64_t row) const {
        if (!factor) return nullptr;
        int64_t group = 0;
        while (row >= ends[group]) group++;
        return factor + group * cols;
    }
};

}  // namespace
}  // namespace lowp

using namespace lowp;

// x [batch, rows, cols] in tiles of tile_rows x tile_cols, one scale each: scale [batch, bands, tiles].
LOWP_API void lowp_quant_tiles(const void* x, uint8_t* y, float* scale, int64_t batch, int64_t rows,
                               int64_t cols, int64_t tile_rows, int64_t tile_cols, float largest, float most,
                               int input, int format, int threads) {
    AmaxScale rule{largest, most, 0};
    int64_t bands = ceil_div(rows, tile_rows), tiles = ceil_div(cols, tile_cols);
    prefer_huge_pages(y, batch * rows * cols);
    parallel(batch * bands, batch * rows * cols, threads, [&](int64_t first, int64_t last) {
        for (int64_t band = first; band < last; band++) {
            int64_t row = band % bands * tile_rows, at = (band / bands * rows + row) * cols;
            for (int64_t t = 0; t < tiles; t++) {
                int64_t col = t * tile_cols;
                Tile tile{at + col, std::min(tile_rows, rows - row), std::min(tile_cols, cols - col), cols};
                float s = rule(active->scaled.amax(x, tile, input, 1));
                active->scaled.encode(x, y, tile, s, input, format);
                scale[band * tiles + t] = s;
            }
        }
    });
}

// x [rows, cols], one scale a row. `smooth` [groups, cols] may be null.
LOWP_API void lowp_quant_tokens(const void* x, const float* smooth, const int64_t* ends, uint8_t* y,
                                float* scale, int64_t rows, int64_t cols, float largest, int input,
                                int format, int threads) {
    Elements e{x, y, input, format};
    AmaxScale rule{largest, __builtin_inff(), 1};
    Smooth factors{smooth, ends, cols};
    prefer_huge_pages(y, rows * cols);
    parallel(rows, rows * cols, threads, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; r++) {
            Tile line{r * cols, 1, cols, cols};
            if (const float* factor = factors.of_row(r)) {
                scale[r] = rule(active->scaled.amax_of_products(x, line, factor, input));
                encode_products(e, line.first, cols, factor, scale[r]);
            } else {
                scale[r] = rule(active->scaled.amax(x, line, input, 0));
                active->scaled.encode(x, y, line, scale[r], input, format);
            }
        }
    });
}

// x [rows, cols], one scale. `smooth` [cols] may be null.
LOWP_API void lowp_quant_tensor(const void* x, const float* smooth, uint8_t* y, float* scale, int64_t rows,
                                int64_t cols, float largest, int input, int format, int threads) {
    Elements e{x, y, input, format};
    int64_t n = rows * cols;
    std::atomic<uint32_t> amax{0};
    auto raise = [&](uint32_t part) {
        for (uint32_t now = amax; now < part && !amax.compare_exchange_weak(now, part);) {
        }
    };
    prefer_huge_pages(y, n);
    if (smooth)
        parallel(rows, n, threads, [&](int64_t first, int64_t last) {
            raise(active->scaled.amax_of_products(x, Tile{first * cols, last - first, cols, cols}, smooth,
                                                  input));
        });
    else
        parallel(n, n, threads, [&](int64_t first, int64_t last) {
            raise(active->scaled.amax(x, Tile{first, 1, last - first, n}, input, 0));
        });
    *scale = AmaxScale{largest, __builtin_inff(), 1}(amax);
    if (!smooth) return encode_all(e, n, *scale, threads);
    parallel(rows, n, threads, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; r++) encode_products(e, r * cols, cols, smooth, *scale);
    });
}

// x [batch, rows, cols], one scale for each column of each matrix. `smooth` [rows] may be null.
LOWP_API void lowp_quant_channels(const void* x, const float* smooth, uint8_t* y, float* scale, int64_t batch,
                                  int64_t rows, int64_t cols, float largest, int input, int format,
                                  int threads) {
    AmaxScale rule{largest, __builtin_inff(), 1};
    constexpr int64_t kColumns = 4 * kLine;  // of one task: a page of each row
    int64_t chunks = ceil_div(cols, kColumns);
    prefer_huge_pages(y, batch * rows * cols);
    parallel(batch * chunks, batch * rows * cols, threads, [&](int64_t first, int64_t last) {
        Filled none(-0.0f), factor(1.0f);
        for (int64_t t = first; t < last; t++) {
            int64_t b = t / chunks, col = t % chunks * kColumns, count = std::min(kColumns, cols - col);
            float* scales = scale + b * cols + col;
            uint32_t amax[kColumns] = {};
            for (int64_t r = 0; r < rows; r++) {
                Tile line{(b * rows + r) * cols + col, 1, count, cols};
                active->scaled.raise_columns(x, line, smooth ? smooth[r] : 1.0f, amax, input);
            }
            for (int64_t c = 0; c < count; c++) scales[c] = rule(amax[c]);
            for (int64_t r = 0; r < rows; r++) {
                if (smooth) std::fill(factor.value, factor.value + kLine, smooth[r]);
                for (int64_t c = 0; c < count; c += kLine) {
                    Tile segment{(b * rows + r) * cols + col + c, 1, std::min(kLine, count - c), cols};
                    active->scaled.encode_each(x, y, segment, factor.value, scales + c, none.value, 1, input,
                                               format);
                }
            }
        }
    });
}

// x [outer, n, inner] / scale [n] or x * scale [n], plus offset [n], which may be null.
LOWP_API void lowp_quantize(const void* x, const float* scale, const float* offset, uint8_t* y, int64_t outer,
                            int64_t n, int64_t inner, int divide, int input, int format, int threads) {
    Elements e{x, y, input, format};
    prefer_huge_pages(y, outer * n * inner);
    if (n == 1 && divide && !offset) return encode_all(e, outer * inner, *scale, threads);
    // Lines have one scale, or are lines of scales where inner is 1.
    bool each = inner == 1;
    int64_t lines = each ? outer : outer * n, cols = each ? n : inner, chunks = ceil_div(cols, kLine);
    parallel(lines * chunks, lines * cols, threads, [&](int64_t first, int64_t last) {
        Filled ones(1.0f), scales(0.0f), offsets(-0.0f);
        for (int64_t t = first, line = -1; t < last; t++) {
            int64_t c = t % chunks * kLine;
            if (!each && line != t / chunks) {
                line = t / chunks;
                scales = Filled(scale[line % n]);
                if (offset) offsets = Filled(offset[line % n]);
            }
            Tile segment{t / chunks * cols + c, 1, std::min(kLine, cols - c), cols};
            active->scaled.encode_each(x, y, segment, ones.value, each ? scale + c : scales.value,
                                       each && offset ? offset + c : offsets.value, divide, input, format);
        }
    });
}
