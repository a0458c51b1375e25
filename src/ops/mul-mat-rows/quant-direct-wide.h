// Rows of weights as they lie, with 16 lanes: Q4_K, and with VNNI Q6_K.
// Included by quant-direct.h. Test: tests/ops/test_quant_rows.py.

#pragma once

namespace dw::DW_QUANT_NAMESPACE {

template <> constexpr int direct_cols<q4_k> = 2;

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

// lane r: the sum of v[r], for 16 vectors
inline vi sums_of_rows(const vi * v) {
    __m512i fours[4];
    for (int g = 0; g < 4; ++g) {
        fours[g] = sums_of_quarters((const __m512i *) v + 4 * g);
    }
    return (vi) sums_over_quarters(fours);
}

// A row of Q4_K. Quants 64 to a vector, of two sub-blocks: 0 and 2, 1 and 3, 4 and 6, 5 and 7. Of 16 bits: 8 scales in
// each quarter, and 8 minima.
template <> struct direct_row<q4_k> {
    __m512i q[4], scales;
    __m128i minima;

    explicit direct_row(const char * block) {
        const __m512i low = _mm512_set1_epi8(0x0f);
        for (int i = 0; i < 2; ++i) {
            const __m512i packed = _mm512_loadu_si512(block + 16 + 64 * i);
            q[2 * i]             = _mm512_and_si512(packed, low);
            q[2 * i + 1]         = _mm512_and_si512(_mm512_srli_epi32(packed, 4), low);
        }
        const __m256i both = scales_and_minima(block + 4);
        scales             = _mm512_broadcast_i32x4(_mm256_castsi256_si128(both));
        minima             = _mm256_extracti128_si256(both, 1);
    }
};

// 256 quants of activations in the order of those, and their sums of 32
template <> struct direct_column<q4_k> {
    __m512i q[4];
    __m128i sums;

    void load(const char * block) {
        const auto quants = [&](int sub) {
            return _mm256_loadu_si256((const __m256i *) (block + offsetof(block_q8_K, qs) + 32 * sub));
        };
        for (int i = 0; i < 4; ++i) {
            const int first = 4 * (i / 2) + i % 2;
            q[i]            = _mm512_inserti64x4(_mm512_castsi256_si512(quants(first)), quants(first + 2), 1);
        }
        const __m256i halves = _mm256_loadu_si256((const __m256i *) (block + offsetof(block_q8_K, bsums)));
        sums                 = _mm_hadd_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    }
};

// 16-bit value `first` of each quarter all over the lower half, value `first` + 2 over the upper one
template <int first> __m512i two_of(const __m512i & v) {
    constexpr int a = (2 * first | (2 * first + 1) << 8) * 0x10001, b = a + 0x04040404;
    return _mm512_shuffle_epi8(v, _mm512_inserti64x4(_mm512_set1_epi32(a), _mm256_set1_epi32(b), 1));
}

inline vi times(const direct_row<q4_k> & w, const direct_column<q4_k> & x) {
    const auto part = [&](int i, const __m512i & factors) {
        return _mm512_madd_epi16(_mm512_maddubs_epi16(w.q[i], x.q[i]), factors);
    };
    const __m512i left  = _mm512_add_epi32(part(0, two_of<0>(w.scales)), part(1, two_of<1>(w.scales)));
    const __m512i right = _mm512_add_epi32(part(2, two_of<4>(w.scales)), part(3, two_of<5>(w.scales)));
    return (vi) _mm512_add_epi32(left, right);
}

inline vi minima_times(const direct_row<q4_k> & w, const direct_column<q4_k> & x) {
    return (vi) _mm512_zextsi128_si512(_mm_madd_epi16(w.minima, x.sums));
}

#ifdef DW_VNNI

template <> constexpr int direct_cols<q6_k> = 2;

// lane 4 l + i <- lane 4 i + l
inline __m512i in_quarters(const __m512i & v) {
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), v);
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

#endif // DW_VNNI

} // namespace dw::DW_QUANT_NAMESPACE
