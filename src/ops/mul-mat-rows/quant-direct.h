// Weights as they lie, for one or two rows of activations: with AVX-512 and VNNI this takes fewer instructions than to
// unpack a tile. Integer sums are those of the tile, so the results are the same bits.
// Test: tests/ops/test_quant_rows.py.

#pragma once

#include "ops/mul-mat-rows/fused.h"
#include "ops/mul-mat-rows/quant-blocks.h"
#include "ops/mul-mat-rows/quant-tile.h"

#ifdef DW_QUANT_LANES

namespace dw::DW_QUANT_NAMESPACE {

// rows of activations that a type's weights meet as they lie
template <typename type> constexpr int direct_cols = 0;

constexpr int direct_blocks = 8; // super-blocks at a time

// Integer sums of super-blocks of each weight row and C rows of activations.
template <typename type, int C> struct direct;

#if DW_QUANT_LANES == 16 && defined(DW_VNNI)

template <> constexpr int direct_cols<q6_k> = 2;

// lane 4 l + i: the sum of the four 32-bit values of v[i] in its 128 bits l
inline __m512i sums_of_quarters(const __m512i * v) {
    const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
    const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

// lane 4 i + k: the sum of lanes k, 4 + k, 8 + k and 12 + k of v[i]
inline __m512i sums_over_quarters(const __m512i * v) {
    const __m512i a = _mm512_add_epi32(_mm512_shuffle_i32x4(v[0], v[1], 0x44), _mm512_shuffle_i32x4(v[0], v[1], 0xee));
    const __m512i b = _mm512_add_epi32(_mm512_shuffle_i32x4(v[2], v[3], 0x44), _mm512_shuffle_i32x4(v[2], v[3], 0xee));
    return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

// A row of Q6_K with quants in their order, 64 to a vector, and scales as sums_of_quarters() leaves sub-blocks.
struct q6_k_row {
    __m512i q[4], scales;

    explicit q6_k_row(const char * block) {
        const __m512i upper_left  = _mm512_inserti64x4(_mm512_set1_epi32(4), _mm256_set1_epi32(2), 1);
        const __m512i upper_right = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(2), 1);
        const __m512i low = _mm512_set1_epi8(0x0f), high = _mm512_set1_epi8(0x30);
        constexpr int either_and = 0xf8; // a | (b & c)
        for (int half = 0; half < 2; ++half) {
            const __m512i nibbles = _mm512_loadu_si512(block + 64 * half);
            const __m512i bits =
                _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *) (block + 128 + 32 * half)));
            q[2 * half] = _mm512_ternarylogic_epi32(_mm512_and_si512(nibbles, low), _mm512_rolv_epi32(bits, upper_left),
                                                    high, either_and);
            q[2 * half + 1] = _mm512_ternarylogic_epi32(_mm512_and_si512(_mm512_srli_epi32(nibbles, 4), low),
                                                        _mm512_rorv_epi32(bits, upper_right), high, either_and);
        }
        scales = in_quarters(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *) (block + 192))));
    }

    // lane 4 l + i <- lane 4 i + l
    static __m512i in_quarters(const __m512i & v) {
        return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), v);
    }
};

// A row of activations: 256 quants, and what a sub-block's sum starts with, as sums_of_quarters() leaves them.
struct q6_k_column {
    __m512i q[4], first;

    void load(const char * block) {
        for (int i = 0; i < 4; ++i) {
            q[i] = _mm512_loadu_si512(block + offsetof(block_q8_K, qs) + 64 * i);
        }
        const __m512i sums =
            _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *) (block + offsetof(block_q8_K, bsums))));
        first = q6_k_row::in_quarters(_mm512_slli_epi32(_mm512_sub_epi32(_mm512_setzero_si512(), sums), 5));
    }
};

inline __m512i times(const q6_k_row & w, const q6_k_column & x) {
    __m512i parts[4];
    for (int i = 0; i < 4; ++i) {
        parts[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w.q[i], x.q[i]);
    }
    return _mm512_mullo_epi32(_mm512_add_epi32(sums_of_quarters(parts), x.first), w.scales);
}

// Row after row, as memory likes it: products of all before any sum over lanes.
template <int C> struct direct<q6_k, C> {
    __m512i products[C][direct_blocks][lanes];

    void multiply(const row_bytes & rows, int n_blocks, const char * const * x) {
        q6_k_column columns[C][direct_blocks];
        for (int c = 0; c < C; ++c) {
            for (int b = 0; b < n_blocks; ++b) {
                columns[c][b].load(x[c] + b * sizeof(block_q8_K));
            }
        }
        for (int r = 0; r < lanes; ++r) {
            for (int b = 0; b < n_blocks; ++b) {
                const q6_k_row row(rows[r] + b * q6_k::block_bytes);
                for (int i = 0; i < 4; ++i) {
                    __builtin_prefetch(rows[r] + b * q6_k::block_bytes + 8192 + 64 * i);
                }
                for (int c = 0; c < C; ++c) {
                    products[c][b][r] = times(row, columns[c][b]);
                }
            }
        }
    }

    // of each row
    vi sums(int c, int b) const {
        __m512i fours[4];
        for (int g = 0; g < 4; ++g) {
            fours[g] = sums_of_quarters(products[c][b] + 4 * g);
        }
        return (vi) sums_over_quarters(fours);
    }
};

#endif

// acc[c] += weights . x[c], up to direct_blocks super-blocks of each
template <typename type, int C>
void direct_dots(const row_bytes & rows, int n_blocks, const char * const * x, vf * acc) {
    direct<type, C> all;
    all.multiply(rows, n_blocks, x);
    for (int b = 0; b < n_blocks; ++b) {
        const vf d = halves_at(rows.from(b * type::block_bytes + type::d_at));
        for (int c = 0; c < C; ++c) {
            float dx;
            std::memcpy(&dx, x[c] + b * sizeof(block_q8_K) + offsetof(block_q8_K, d), sizeof(dx));
            acc[c] = fused(to_float(all.sums(c, b)), d * dx, acc[c]);
        }
    }
}

} // namespace dw::DW_QUANT_NAMESPACE

#endif // DW_QUANT_LANES
