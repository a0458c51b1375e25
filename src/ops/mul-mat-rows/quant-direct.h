// Weights as they lie, for one or two rows of activations: Q6_K with AVX-512 and VNNI; with 8 lanes, Q6_K and Q4_K.
// This takes fewer instructions than to unpack a tile. Integer sums are those of the tile, so the results are the same
// bits. Test: tests/ops/test_quant_rows.py.

#pragma once

#include "ops/mul-mat-rows/fused.h"
#include "ops/mul-mat-rows/prefetch.h"
#include "ops/mul-mat-rows/quant-blocks.h"
#include "ops/mul-mat-rows/quant-tile.h"

#ifdef DW_QUANT_LANES

namespace dw::DW_QUANT_NAMESPACE {

// rows of activations that a type's weights meet as they lie
template <typename type> constexpr int direct_cols = 0;

constexpr int direct_blocks = 8;    // super-blocks at a time
constexpr int ahead_bytes   = 8192; // from a row's block to what is prefetched meanwhile

// A super-block of a weight row, unpacked, and one of activations. times() leaves lanes whose sum is their product.
template <typename type> struct direct_row;
template <typename type> struct direct_column;

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

// lane 4 l + i <- lane 4 i + l
inline __m512i in_quarters(const __m512i & v) {
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), v);
}

// lane r: the sum of v[r], for 16 vectors
inline vi sums_of_rows(const vi * v) {
    __m512i fours[4];
    for (int g = 0; g < 4; ++g) {
        fours[g] = sums_of_quarters((const __m512i *) v + 4 * g);
    }
    return (vi) sums_over_quarters(fours);
}

// A row of Q6_K with quants in their order, 64 to a vector, and scales as sums_of_quarters() leaves sub-blocks.
template <> struct direct_row<q6_k> {
    __m512i q[4], scales;

    explicit direct_row(const char * block) {
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
};

// A row of activations: 256 quants, and what a sub-block's sum starts with, as sums_of_quarters() leaves them.
template <> struct direct_column<q6_k> {
    __m512i q[4], first;

    void load(const char * block) {
        for (int i = 0; i < 4; ++i) {
            q[i] = _mm512_loadu_si512(block + offsetof(block_q8_K, qs) + 64 * i);
        }
        const __m512i sums =
            _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *) (block + offsetof(block_q8_K, bsums))));
        first = in_quarters(_mm512_slli_epi32(_mm512_sub_epi32(_mm512_setzero_si512(), sums), 5));
    }
};

inline vi times(const direct_row<q6_k> & w, const direct_column<q6_k> & x) {
    __m512i parts[4];
    for (int i = 0; i < 4; ++i) {
        parts[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w.q[i], x.q[i]);
    }
    return (vi) _mm512_mullo_epi32(_mm512_add_epi32(sums_of_quarters(parts), x.first), w.scales);
}

#elif DW_QUANT_LANES == 8

template <> constexpr int direct_cols<q6_k> = 2;
template <> constexpr int direct_cols<q4_k> = 2;

// lane r: the sum of v[r], for 8 vectors
inline vi sums_of_rows(const vi * v) {
    __m256i fours[2];
    for (int g = 0; g < 2; ++g) {
        const __m256i * p = (const __m256i *) v + 4 * g;
        const __m256i   a = _mm256_add_epi32(_mm256_unpacklo_epi32(p[0], p[1]), _mm256_unpackhi_epi32(p[0], p[1]));
        const __m256i   b = _mm256_add_epi32(_mm256_unpacklo_epi32(p[2], p[3]), _mm256_unpackhi_epi32(p[2], p[3]));
        fours[g]          = _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    }
    return (vi) _mm256_add_epi32(_mm256_permute2x128_si256(fours[0], fours[1], 0x20),
                                 _mm256_permute2x128_si256(fours[0], fours[1], 0x31));
}

inline __m256i load_256(const char * p) {
    return _mm256_loadu_si256((const __m256i *) p);
}

inline __m256i nibbles(const __m256i & v, int shift) {
    return _mm256_and_si256(_mm256_srli_epi32(v, shift), _mm256_set1_epi8(15));
}

// 16-bit values `low` and `high` of both halves of v: one all over the lower 128 bits, one over the upper ones
inline __m256i two_of(const __m256i & v, int low, int high) {
    const short first = (short) (2 * low | (2 * low + 1) << 8), second = (short) (2 * high | (2 * high + 1) << 8);
    return _mm256_shuffle_epi8(v, _mm256_set_m128i(_mm_set1_epi16(second), _mm_set1_epi16(first)));
}

// 256 quants of activations, 32 to a vector, and their sums
template <typename type> struct direct_column {
    __m256i q[8], sums; // 16-bit sums of 16; where a sub-block has 32, of 32 and in the lower half

    void load(const char * block) {
        for (int i = 0; i < 8; ++i) {
            q[i] = load_256(block + offsetof(block_q8_K, qs) + 32 * i);
        }
        sums = load_256(block + offsetof(block_q8_K, bsums));
        if (type::sub == 32) {
            sums = _mm256_permute4x64_epi64(_mm256_hadd_epi16(sums, sums), 0x08);
        }
    }
};

// A row of Q6_K: quants, 32 to a vector, and 16 scales of 16 bits.
template <> struct direct_row<q6_k> {
    __m256i q[8], scales;

    explicit direct_row(const char * block) {
        for (int half = 0; half < 2; ++half) {
            const __m256i a = load_256(block + 64 * half), b = load_256(block + 64 * half + 32);
            const __m256i upper = load_256(block + 128 + 32 * half);
            const auto    bits  = [&](const __m256i & v) { return _mm256_and_si256(v, _mm256_set1_epi8(0x30)); };
            q[4 * half]         = _mm256_or_si256(nibbles(a, 0), bits(_mm256_slli_epi32(upper, 4)));
            q[4 * half + 1]     = _mm256_or_si256(nibbles(b, 0), bits(_mm256_slli_epi32(upper, 2)));
            q[4 * half + 2]     = _mm256_or_si256(nibbles(a, 4), bits(upper));
            q[4 * half + 3]     = _mm256_or_si256(nibbles(b, 4), bits(_mm256_srli_epi32(upper, 2)));
        }
        scales = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *) (block + 192)));
    }
};

inline vi times(const direct_row<q6_k> & w, const direct_column<q6_k> & x) {
    const __m256i scales[2] = { _mm256_permute4x64_epi64(w.scales, 0x44), _mm256_permute4x64_epi64(w.scales, 0xee) };
    __m256i       sum       = _mm256_slli_epi32(_mm256_madd_epi16(w.scales, x.sums), 5); // quants are 32 too large
    sum                     = _mm256_sub_epi32(_mm256_setzero_si256(), sum);
    for (int i = 0; i < 8; ++i) {
        const __m256i products = _mm256_maddubs_epi16(w.q[i], x.q[i]);
        const __m256i factors  = two_of(scales[i / 4], 2 * (i % 4), 2 * (i % 4) + 1);
        sum                    = _mm256_add_epi32(sum, _mm256_madd_epi16(products, factors));
    }
    return (vi) sum;
}

// A row of Q4_K: quants, 32 to a vector, 8 scales of 16 bits in both halves, and 8 minima in the lower one.
template <> struct direct_row<q4_k> {
    __m256i q[8], scales, minima;

    explicit direct_row(const char * block) {
        for (int i = 0; i < 4; ++i) {
            const __m256i packed = load_256(block + 16 + 32 * i);
            q[2 * i]             = nibbles(packed, 0);
            q[2 * i + 1]         = nibbles(packed, 4);
        }
        uint32_t s[3];
        std::memcpy(s, block + 4, sizeof(s));
        const __m256i both = _mm256_cvtepu8_epi16(_mm_setr_epi32(
            (int) (s[0] & 0x3f3f3f3f), (int) ((s[2] & 0x0f0f0f0f) | (s[0] >> 6 & 0x03030303) << 4),
            (int) (s[1] & 0x3f3f3f3f), (int) ((s[2] >> 4 & 0x0f0f0f0f) | (s[1] >> 6 & 0x03030303) << 4)));
        scales             = _mm256_permute4x64_epi64(both, 0x44);
        minima             = _mm256_permute2x128_si256(both, both, 0x81); // zeros above
    }
};

inline vi times(const direct_row<q4_k> & w, const direct_column<q4_k> & x) {
    __m256i sum = _mm256_setzero_si256();
    for (int i = 0; i < 8; ++i) {
        const __m256i products = _mm256_maddubs_epi16(w.q[i], x.q[i]);
        sum                    = _mm256_add_epi32(sum, _mm256_madd_epi16(products, two_of(w.scales, i, i)));
    }
    return (vi) sum;
}

inline vi minima_times(const direct_row<q4_k> & w, const direct_column<q4_k> & x) {
    return (vi) _mm256_madd_epi16(w.minima, x.sums);
}

#endif

// Row after row, as memory likes it: products of up to direct_blocks super-blocks before any sum over lanes.
template <typename type, int C> struct direct_products {
    vi products[C][direct_blocks][lanes];
    vi minima[type::has_minima ? C : 1][type::has_minima ? direct_blocks : 1][lanes];

    direct_products(const row_bytes & rows, int n_blocks, const char * const * x) {
        direct_column<type> columns[C][direct_blocks];
        for (int c = 0; c < C; ++c) {
            for (int b = 0; b < n_blocks; ++b) {
                columns[c][b].load(x[c] + b * sizeof(block_q8_K));
            }
        }
        for (int r = 0; r < lanes; ++r) {
            for (int b = 0; b < n_blocks; ++b) {
                const char *           block = rows[r] + b * type::block_bytes;
                const direct_row<type> row(block);
                for (int i = 0; i < type::block_bytes; i += 64) {
                    prefetch_line(block + ahead_bytes + i);
                }
                for (int c = 0; c < C; ++c) {
                    products[c][b][r] = times(row, columns[c][b]);
                    if constexpr (type::has_minima) {
                        minima[c][b][r] = minima_times(row, columns[c][b]);
                    }
                }
            }
        }
    }
};

// acc[c] += weights . x[c], up to direct_blocks super-blocks of each
template <typename type, int C>
void direct_dots(const row_bytes & rows, int n_blocks, const char * const * x, vf * acc) {
    const direct_products<type, C> found(rows, n_blocks, x);
    for (int b = 0; b < n_blocks; ++b) {
        const row_bytes block = rows.from(b * type::block_bytes);
        const vf        d     = halves_at(block.from(type::d_at));
        const vf        min   = type::has_minima ? halves_at(block.from(type::d_at + 2)) : vf{};
        for (int c = 0; c < C; ++c) {
            float dx;
            std::memcpy(&dx, x[c] + b * sizeof(block_q8_K) + offsetof(block_q8_K, d), sizeof(dx));
            acc[c] = fused(to_float(sums_of_rows(found.products[c][b])), d * dx, acc[c]);
            if constexpr (type::has_minima) {
                acc[c] = fused(to_float(sums_of_rows(found.minima[c][b])), -min * dx, acc[c]);
            }
        }
    }
}

} // namespace dw::DW_QUANT_NAMESPACE

#endif // DW_QUANT_LANES
