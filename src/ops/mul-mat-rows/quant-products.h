// Quantised weights of a matrix times rows of activations, in tiles: quant-tile.h, quant-dots.h.
// Included by a source per width of vectors. Test: tests/ops/test_quant_rows.py.

#pragma once

#include "ops/mul-mat-rows/prefetch.h"
#include "ops/mul-mat-rows/quant-direct.h"
#include "ops/mul-mat-rows/quant-dots.h"
#include "ops/mul-mat-rows/quant-rows.h"

#ifdef DW_QUANT_LANES

#include <algorithm>
#include <type_traits>
#include <vector>

namespace dw::DW_QUANT_NAMESPACE {

constexpr int chunk_cols = 256; // rows of activations that an unpacked tile meets: their sums stay in the first cache
constexpr int max_cols   = lanes == 16 ? 8 : 4; // at once: their sums stay in registers

// up to 256 values of a tile, from block `at` of each row on
template <typename type, typename = void> struct tiles {
    static constexpr int n_values = 32 * 8;

    static size_t row_size(int64_t n) { return n / 32 * type::block_bytes; }
    static int    n_blocks(int64_t n, int64_t at) { return (int) std::min<int64_t>(8, n / 32 - 8 * at); }
    static void   unpack(const row_bytes & rows, int64_t n, int64_t at, quant_tile & t) {
        for (int b = 0; b < n_blocks(n, at); ++b) {
            const row_bytes here = rows.from((8 * at + b) * type::block_bytes);
            type::unpack(here, t, b);
            t.d[b] = halves_at(here);
            add_bias(t, b);
        }
    }
    template <int C> static void dots(const quant_tile & t, int64_t n, int64_t at, const char * const * x, vf * acc) {
        const char * here[C];
        for (int c = 0; c < C; ++c) {
            here[c] = x[c] + 8 * at * sizeof(block_q8_0);
        }
        block_dots<type, C>(t, n_blocks(n, at), here, acc);
    }
};

template <typename type> struct tiles<type, std::enable_if_t<(type::sub > 0)>> {
    static constexpr int n_values = QK_K;

    static size_t row_size(int64_t n) { return n / QK_K * type::block_bytes; }
    static void   unpack(const row_bytes & rows, int64_t, int64_t at, quant_tile & t) {
        type::unpack(rows.from(at * type::block_bytes), t);
    }
    template <int C> static void dots(const quant_tile & t, int64_t, int64_t at, const char * const * x, vf * acc) {
        const char * here[C];
        for (int c = 0; c < C; ++c) {
            here[c] = x[c] + at * sizeof(block_q8_K);
        }
        super_block_dots<type, C>(t, here, acc);
    }
};

// the tile with all x, C at a time, then fewer
template <typename type, int C>
void meet(const quant_tile & t, int64_t n, int64_t at, const char * const * x, int64_t n_cols, vf * acc) {
    int64_t c = 0;
    for (; c + C <= n_cols; c += C) {
        tiles<type>::template dots<C>(t, n, at, x + c, acc + c);
    }
    if constexpr (C > 1) {
        if (c < n_cols) {
            meet<type, C / 2>(t, n, at, x + c, n_cols - c, acc + c);
        }
    }
}

// Few columns and weights as they lie, if the type can. Returns whether that was done.
template <typename type> bool meet_directly(const row_bytes & rows, const quant_product & m, vf * acc) {
    if constexpr (direct_cols<type> > 0) {
        const int n_blocks = (int) (m.n / QK_K);
        for (int b = 0; b < n_blocks && m.n_cols <= direct_cols<type>; b += direct_blocks) {
            const row_bytes here   = rows.from(b * type::block_bytes);
            const int       n_here = std::min(direct_blocks, n_blocks - b);
            const size_t    done   = b * sizeof(block_q8_K);
            const char *    x[2]   = { m.x[0] + done, m.x[m.n_cols - 1] + done };
            m.n_cols == 1 ? direct_dots<type, 1>(here, n_here, x, acc) : direct_dots<type, 2>(here, n_here, x, acc);
        }
        return m.n_cols <= direct_cols<type>;
    }
    return false;
}

// The next tile's weights: rows of a tile are many streams, too many for the hardware to foresee.
inline void prefetch(const char * from, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) {
        prefetch_line(from + i);
    }
}

// The tiles of a thread: pieces of up to 16 tiles in turn, so that all threads read from one place in memory.
struct share {
    int64_t n_tiles, piece, ith, nth;

    share(int64_t n_rows, int i, int n) :
        n_tiles((n_rows + lanes - 1) / lanes),
        ith(i),
        nth(n) {
        piece = std::clamp<int64_t>(n_tiles / (4 * nth), 1, 16);
    }
    // the k-th; n_tiles or more: there are no more
    int64_t operator[](int64_t k) const { return (k / piece * nth + ith) * piece + k % piece; }
};

// The last rows of a matrix, and zeros up to a whole tile.
// Not inline: what is static in an inline function would keep a CPU module that was only asked for its score loaded.
static row_bytes padded(const row_bytes & rows, int64_t n_rows, size_t row_size) {
    static thread_local std::vector<char> copy;
    copy.assign(lanes * row_size, 0);
    for (int64_t r = 0; r < n_rows; ++r) {
        std::memcpy(copy.data() + r * row_size, rows[(int) r], row_size);
    }
    return { copy.data(), row_size };
}

template <typename type> void rows_of(const quant_product & m, int ith, int nth) {
    const int64_t n_slices = (m.n + tiles<type>::n_values - 1) / tiles<type>::n_values;
    const size_t  ahead    = lanes * m.stride / std::max<int64_t>(n_slices, 1);
    const share   mine(m.n_rows, ith, nth);
    vf            acc[chunk_cols];
    quant_tile    t;
    for (int64_t k = 0; mine[k] < mine.n_tiles; ++k) {
        const int64_t row     = mine[k] * lanes;
        const int64_t n_whole = std::min<int64_t>(lanes, m.n_rows - row);
        row_bytes     rows{ m.weights + row * m.stride, m.stride };
        if (n_whole < lanes) {
            rows = padded(rows, n_whole, tiles<type>::row_size(m.n));
        }
        const char * next = m.weights + mine[k + 1] * lanes * m.stride;
        for (int64_t c = 0; c < m.n_cols; c += chunk_cols) {
            const int64_t n_here = std::min<int64_t>(chunk_cols, m.n_cols - c);
            std::fill_n(acc, n_here, vf{});
            const bool is_done = meet_directly<type>(rows, m, acc);
            for (int64_t at = 0; at < n_slices && !is_done; ++at) {
                if (c == 0 && mine[k + 1] < mine.n_tiles) {
                    prefetch(next + at * ahead, ahead);
                }
                tiles<type>::unpack(rows, m.n, at, t);
                meet<type, max_cols>(t, m.n, at, m.x + c, n_here, acc);
            }
            const size_t n_bytes = n_whole * sizeof(float);
            for (int64_t i = 0; i < n_here; ++i) {
                std::memcpy(m.out[c + i] + row, &acc[i], n_bytes);
            }
        }
    }
}

inline void products(ggml_type type, const quant_product & m, int ith, int nth) {
    switch (type) {
        case GGML_TYPE_Q4_K:
            return rows_of<q4_k>(m, ith, nth);
        case GGML_TYPE_Q5_K:
            return rows_of<q5_k>(m, ith, nth);
        case GGML_TYPE_Q6_K:
            return rows_of<q6_k>(m, ith, nth);
        case GGML_TYPE_IQ4_XS:
            return rows_of<iq4_xs>(m, ith, nth);
        case GGML_TYPE_Q4_0:
            return rows_of<q4_0>(m, ith, nth);
        case GGML_TYPE_Q5_0:
            return rows_of<q5_0>(m, ith, nth);
        case GGML_TYPE_Q8_0:
            return rows_of<q8_0>(m, ith, nth);
        default:
            return rows_of<iq4_nl>(m, ith, nth);
    }
}

} // namespace dw::DW_QUANT_NAMESPACE

#endif // DW_QUANT_LANES
