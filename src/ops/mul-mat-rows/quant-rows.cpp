// See quant-rows.h.

#include "ops/mul-mat-rows/quant-rows.h"

#include "ops/mul-mat-rows/quant-dots.h"

#include <algorithm>
#include <vector>

namespace dw {

#ifdef DW_QUANT_ROWS

namespace {

constexpr int chunk_cols = 256; // rows of activations that an unpacked tile meets: their sums stay in the first cache
#if DW_QUANT_ROWS == 16
constexpr int max_cols = 8; // at once: their sums stay in registers
#else
constexpr int max_cols = 4;
#endif

// --- activations

constexpr int part = 16; // values
using floats       = float __attribute__((vector_size(part * 4)));
using ints         = int32_t __attribute__((vector_size(part * 4)));
using bytes        = int8_t __attribute__((vector_size(part)));

inline floats load(const float * p) {
    floats v;
    std::memcpy(&v, p, sizeof(v));
    return v;
}

template <int n> float largest(const float * x) {
    floats most{};
    for (int i = 0; i < n; i += part) {
        const floats v    = load(x + i);
        const floats size = v < 0.0f ? -v : v;
        most              = size > most ? size : most;
    }
    float result = 0.0f;
    for (int i = 0; i < part; ++i) {
        result = std::max(result, most[i]);
    }
    return result;
}

// x / d, to nearest: adding 1.5 * 2^23 leaves the integer in the low bits
inline ints rounded(const floats & x, float inverse) {
    constexpr float magic = 12582912.0f;
    return (ints) (x * inverse + magic) - (ints) (floats{} + magic);
}

inline void store_quants(const ints & values, int8_t bits, void * out) {
    const bytes packed = __builtin_convertvector(values, bytes) ^ bits;
    std::memcpy(out, &packed, sizeof(packed));
}

inline int16_t sum(const ints & values) {
    int32_t result = 0;
    for (int i = 0; i < part; ++i) {
        result += values[i];
    }
    return (int16_t) result;
}

void quantise(const float * x, block_q8_K & out) {
    const float most    = largest<QK_K>(x);
    const float inverse = most > 0.0f ? 127.0f / most : 0.0f;
    out.d               = most / 127.0f;
    for (int i = 0; i < QK_K; i += part) {
        const ints q        = rounded(load(x + i), inverse);
        out.bsums[i / part] = sum(q);
        store_quants(q, 0, out.qs + i);
    }
}

void quantise(const float * x, block_q8_0 & out) {
    const float       most    = largest<QK8_0>(x);
    const float       inverse = most > 0.0f ? 127.0f / most : 0.0f;
    const ggml_fp16_t d       = ggml_fp32_to_fp16(most / 127.0f);
    std::memcpy(&out, &d, sizeof(d));
    for (int i = 0; i < QK8_0; i += part) {
        store_quants(rounded(load(x + i), inverse), is_vnni ? -128 : 0, out.qs + i);
    }
}

// --- products

struct matrix {
    int64_t              n; // values of a row
    const char *         weights;
    size_t               stride;
    const char * const * x;
    float * const *      out;
};

// up to 256 values of a tile, from block `at` of each row on
template <typename type, typename = void> struct tiles {
    static constexpr int n_values = 32 * 8;

    static int  n_blocks(int64_t n, int64_t at) { return (int) std::min<int64_t>(8, n / 32 - 8 * at); }
    static void unpack(const row_bytes & rows, int64_t n, int64_t at, quant_tile & t) {
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

    static void unpack(const row_bytes & rows, int64_t, int64_t at, quant_tile & t) {
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

// The next tile's weights: rows of a tile are many streams, too many for the hardware to foresee.
inline void prefetch(const char * from, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(from + i);
    }
}

// The tiles of a thread: pieces of up to 4 tiles in turn, so that all threads read from one place in memory.
struct share {
    int64_t n_tiles, piece, ith, nth;

    share(int64_t n_rows, int i, int n) :
        n_tiles((n_rows + lanes - 1) / lanes),
        ith(i),
        nth(n) {
        piece = std::clamp<int64_t>(n_tiles / (4 * nth), 1, 4);
    }
    // the k-th; n_tiles or more: there are no more
    int64_t operator[](int64_t k) const { return (k / piece * nth + ith) * piece + k % piece; }
};

// The last rows of a matrix, and zeros up to a whole tile.
row_bytes padded(const row_bytes & rows, int64_t n_rows) {
    static thread_local std::vector<char> copy;
    copy.assign(lanes * rows.stride, 0);
    std::memcpy(copy.data(), rows.first, n_rows * rows.stride);
    return { copy.data(), rows.stride };
}

template <typename type> void rows_of(const matrix & m, int64_t n_cols, int64_t n_rows, int ith, int nth) {
    const int64_t n_tiles = (m.n + tiles<type>::n_values - 1) / tiles<type>::n_values;
    const size_t  ahead   = lanes * m.stride / n_tiles;
    const share   mine(n_rows, ith, nth);
    vf            acc[chunk_cols];
    quant_tile    t;
    for (int64_t k = 0; mine[k] < mine.n_tiles; ++k) {
        const int64_t row     = mine[k] * lanes;
        const int64_t n_whole = std::min<int64_t>(lanes, n_rows - row);
        row_bytes     rows{ m.weights + row * m.stride, m.stride };
        if (n_whole < lanes) {
            rows = padded(rows, n_whole);
        }
        const char * next = m.weights + mine[k + 1] * lanes * m.stride;
        for (int64_t c = 0; c < n_cols; c += chunk_cols) {
            const int64_t n_here = std::min<int64_t>(chunk_cols, n_cols - c);
            std::fill_n(acc, n_here, vf{});
            for (int64_t at = 0; at < n_tiles; ++at) {
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

bool has_super_blocks(ggml_type weights) {
    return weights == GGML_TYPE_Q4_K || weights == GGML_TYPE_Q5_K || weights == GGML_TYPE_Q6_K ||
           weights == GGML_TYPE_IQ4_XS;
}

} // namespace

bool quant_rows_support(ggml_type type) {
    return has_super_blocks(type) || type == GGML_TYPE_Q4_0 || type == GGML_TYPE_Q5_0 || type == GGML_TYPE_Q8_0 ||
           type == GGML_TYPE_IQ4_NL;
}

int64_t quant_block_size(ggml_type weights) {
    return has_super_blocks(weights) ? QK_K : QK8_0;
}

size_t quant_row_size(ggml_type weights, int64_t n) {
    return has_super_blocks(weights) ? n / QK_K * sizeof(block_q8_K) : n / QK8_0 * sizeof(block_q8_0);
}

void quantise_row(ggml_type weights, const float * x, char * out, int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
        if (has_super_blocks(weights)) {
            quantise(x + b * QK_K, ((block_q8_K *) out)[b]);
        } else {
            quantise(x + b * QK8_0, ((block_q8_0 *) out)[b]);
        }
    }
}

void quant_rows(ggml_type type, int64_t n, const char * weights, size_t stride, const char * const * x,
                float * const * out, int64_t n_cols, int64_t n_rows, int ith, int nth) {
    const matrix m{ n, weights, stride, x, out };
    switch (type) {
        case GGML_TYPE_Q4_K:
            return rows_of<q4_k>(m, n_cols, n_rows, ith, nth);
        case GGML_TYPE_Q5_K:
            return rows_of<q5_k>(m, n_cols, n_rows, ith, nth);
        case GGML_TYPE_Q6_K:
            return rows_of<q6_k>(m, n_cols, n_rows, ith, nth);
        case GGML_TYPE_IQ4_XS:
            return rows_of<iq4_xs>(m, n_cols, n_rows, ith, nth);
        case GGML_TYPE_Q4_0:
            return rows_of<q4_0>(m, n_cols, n_rows, ith, nth);
        case GGML_TYPE_Q5_0:
            return rows_of<q5_0>(m, n_cols, n_rows, ith, nth);
        case GGML_TYPE_Q8_0:
            return rows_of<q8_0>(m, n_cols, n_rows, ith, nth);
        default:
            return rows_of<iq4_nl>(m, n_cols, n_rows, ith, nth);
    }
}

#else

bool quant_rows_support(ggml_type) {
    return false;
}

int64_t quant_block_size(ggml_type) {
    return 1;
}

size_t quant_row_size(ggml_type, int64_t) {
    return 0;
}

void quantise_row(ggml_type, const float *, char *, int64_t, int64_t) {}

void quant_rows(ggml_type, int64_t, const char *, size_t, const char * const *, float * const *, int64_t, int64_t, int,
                int) {}

#endif

} // namespace dw
