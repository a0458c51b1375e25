// Rows of weights as they lie, with 8 lanes: Q4_K and Q6_K.
// Included by quant-direct.h. Test: tests/ops/test_quant_rows.py.

#pragma once

namespace dw::DW_QUANT_NAMESPACE {

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
        const __m256i both = scales_and_minima(block + 4);
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

} // namespace dw::DW_QUANT_NAMESPACE
