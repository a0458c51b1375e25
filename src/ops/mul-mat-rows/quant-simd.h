// What quantised products need of a CPU: AVX-512 (with VNNI or without), AVX2 (likewise), NEON with dotprod.
// A vector has a lane for each of `lanes` weight rows; a 32-bit lane holds four quants of its row. Sums of integers are
// exact, so every CPU, every width and every order gives the same.
// DW_QUANT_LANES is defined where there is all of it: the widest vectors, or with DW_QUANT_NARROW those of half the
// width beside AVX-512. What depends on the width is in namespace dw::DW_QUANT_NAMESPACE, so both can be in one
// library. Test: tests/ops/test_quant_rows.py.

#pragma once

#include "ops/mul-mat-rows/quant-cpu.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(DW_QUANT_NARROW) && defined(DW_QUANT_HAS_NARROW)
#define DW_QUANT_LANES 8
#define DW_QUANT_NAMESPACE lanes8
#elif defined(DW_QUANT_NARROW)
#elif DW_QUANT_WIDEST == 16
#define DW_QUANT_LANES 16
#define DW_QUANT_NAMESPACE lanes16
#elif DW_QUANT_WIDEST == 8
#define DW_QUANT_LANES 8
#define DW_QUANT_NAMESPACE lanes8
#elif DW_QUANT_WIDEST == 4
#define DW_QUANT_LANES 4
#define DW_QUANT_NAMESPACE lanes4
#endif

#ifdef DW_QUANT_LANES

#if DW_QUANT_LANES == 4
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

namespace dw::DW_QUANT_NAMESPACE {

constexpr int lanes = DW_QUANT_LANES;

using vi = int32_t __attribute__((vector_size(lanes * 4)));
using vu = uint32_t __attribute__((vector_size(lanes * 4)));
using vf = float __attribute__((vector_size(lanes * 4)));
using vb = int8_t __attribute__((vector_size(lanes * 4)));

inline vi all(int32_t value) {
    return vi{} + value;
}

// the four bytes at p in every lane
inline vi broadcast(const char * p) {
    int32_t value;
    std::memcpy(&value, p, sizeof(value));
    return all(value);
}

inline vf to_float(const vi & v) {
    return __builtin_convertvector(v, vf);
}

inline vi shift_right(const vi & v, int n) { // no sign
    return (vi) ((vu) v >> n);
}

inline vi low_nibbles(const vi & v) {
    return v & 0x0f0f0f0f;
}

inline vi high_nibbles(const vi & v) {
    return shift_right(v, 4) & 0x0f0f0f0f;
}

// Weight rows of a tile, one behind the other.
struct row_bytes {
    const char * first;
    size_t       stride;

    const char * operator[](int r) const { return first + r * stride; }
    row_bytes    from(size_t at) const { return { first + at, stride }; }
};

// out[i] = bytes 4 i to 4 i + 3 of the first 16 bytes of each row
inline void quad(const row_bytes & rows, vi * out) {
#if DW_QUANT_LANES == 4
    const int32x4_t   a = vld1q_s32((const int32_t *) rows[0]);
    const int32x4_t   b = vld1q_s32((const int32_t *) rows[1]);
    const int32x4_t   c = vld1q_s32((const int32_t *) rows[2]);
    const int32x4_t   d = vld1q_s32((const int32_t *) rows[3]);
    const int32x4x2_t x = vtrnq_s32(a, b); // a0 b0 a2 b2, a1 b1 a3 b3
    const int32x4x2_t y = vtrnq_s32(c, d);
    out[0]              = (vi) vcombine_s32(vget_low_s32(x.val[0]), vget_low_s32(y.val[0]));
    out[1]              = (vi) vcombine_s32(vget_low_s32(x.val[1]), vget_low_s32(y.val[1]));
    out[2]              = (vi) vcombine_s32(vget_high_s32(x.val[0]), vget_high_s32(y.val[0]));
    out[3]              = (vi) vcombine_s32(vget_high_s32(x.val[1]), vget_high_s32(y.val[1]));
#else
    const auto load = [&](int r) { return _mm_loadu_si128((const __m128i *) rows[r]); };
#if DW_QUANT_LANES == 16
    const auto every_fourth = [&](int r) { // rows r, r + 4, ... in 128 bits each
        __m512i v = _mm512_castsi128_si512(load(r));
        v         = _mm512_inserti32x4(v, load(r + 4), 1);
        v         = _mm512_inserti32x4(v, load(r + 8), 2);
        return _mm512_inserti32x4(v, load(r + 12), 3);
    };
    const __m512i a = every_fourth(0), b = every_fourth(1), c = every_fourth(2), d = every_fourth(3);
    const __m512i ab = _mm512_unpacklo_epi32(a, b), ab2 = _mm512_unpackhi_epi32(a, b);
    const __m512i cd = _mm512_unpacklo_epi32(c, d), cd2 = _mm512_unpackhi_epi32(c, d);
    out[0] = (vi) _mm512_unpacklo_epi64(ab, cd);
    out[1] = (vi) _mm512_unpackhi_epi64(ab, cd);
    out[2] = (vi) _mm512_unpacklo_epi64(ab2, cd2);
    out[3] = (vi) _mm512_unpackhi_epi64(ab2, cd2);
#else
    const auto every_fourth = [&](int r) {
        return _mm256_inserti128_si256(_mm256_castsi128_si256(load(r)), load(r + 4), 1);
    };
    const __m256i a = every_fourth(0), b = every_fourth(1), c = every_fourth(2), d = every_fourth(3);
    const __m256i ab = _mm256_unpacklo_epi32(a, b), ab2 = _mm256_unpackhi_epi32(a, b);
    const __m256i cd = _mm256_unpacklo_epi32(c, d), cd2 = _mm256_unpackhi_epi32(c, d);
    out[0] = (vi) _mm256_unpacklo_epi64(ab, cd);
    out[1] = (vi) _mm256_unpackhi_epi64(ab, cd);
    out[2] = (vi) _mm256_unpacklo_epi64(ab2, cd2);
    out[3] = (vi) _mm256_unpackhi_epi64(ab2, cd2);
#endif
#endif
}

// F16 in the low half of each lane
inline vf halves(const vi & v) {
#if DW_QUANT_LANES == 16
    return (vf) _mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i) v));
#elif DW_QUANT_LANES == 8
    const __m256i low = (__m256i) (v & 0xffff);
    return (vf) _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
#else
    return (vf) vcvt_f32_f16(vreinterpret_f16_s16(vmovn_s32((int32x4_t) v)));
#endif
}

inline float half(const char * p) {
#if DW_QUANT_LANES == 4
    __fp16 value;
    std::memcpy(&value, p, sizeof(value));
    return value;
#else
    uint16_t bits;
    std::memcpy(&bits, p, sizeof(bits));
    return _cvtsh_ss(bits);
#endif
}

// a value of 16 for each byte, which is below 16
inline vi look_up(const int8_t * table, const vi & v) {
#if DW_QUANT_LANES == 4
    return (vi) vqtbl1q_s8(vld1q_s8(table), (uint8x16_t) v);
#elif DW_QUANT_LANES == 8
    return (vi) _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *) table)), (__m256i) v);
#else
    return (vi) _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *) table)), (__m512i) v);
#endif
}

// sum + the four products of bytes in each lane. a: unsigned with DW_VNNI, else NEON's signed; b: signed
#if defined(DW_VNNI) || DW_QUANT_LANES == 4
#define DW_DOT4
inline vi dot4(const vi & sum, const vi & a, const vi & b) {
#if DW_QUANT_LANES == 16
    return (vi) _mm512_dpbusd_epi32((__m512i) sum, (__m512i) a, (__m512i) b);
#elif DW_QUANT_LANES == 8 && defined(__AVX512VNNI__)
    return (vi) _mm256_dpbusd_epi32((__m256i) sum, (__m256i) a, (__m256i) b);
#elif DW_QUANT_LANES == 8
    return (vi) _mm256_dpbusd_avx_epi32((__m256i) sum, (__m256i) a, (__m256i) b);
#else
    return (vi) vdotq_s32((int32x4_t) sum, (int8x16_t) a, (int8x16_t) b);
#endif
}
#endif

// sum + the two products of 16-bit integers in each lane
inline vi dot2(const vi & sum, const vi & a, const vi & b) {
#if DW_QUANT_LANES == 16
#ifdef DW_VNNI
    return (vi) _mm512_dpwssd_epi32((__m512i) sum, (__m512i) a, (__m512i) b);
#else
    return sum + (vi) _mm512_madd_epi16((__m512i) a, (__m512i) b);
#endif
#elif DW_QUANT_LANES == 8
#if defined(__AVX512VNNI__)
    return (vi) _mm256_dpwssd_epi32((__m256i) sum, (__m256i) a, (__m256i) b);
#elif defined(DW_VNNI)
    return (vi) _mm256_dpwssd_avx_epi32((__m256i) sum, (__m256i) a, (__m256i) b);
#else
    return sum + (vi) _mm256_madd_epi16((__m256i) a, (__m256i) b);
#endif
#else
    const int16x8_t x = (int16x8_t) a, y = (int16x8_t) b;
    return sum + (vi) vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
#endif
}

#ifndef DW_DOT4
// Sums of two products in each 16-bit half: a unsigned, b signed, no saturation where a * b * 2 stays below 2^15.
inline vi products16(const vi & a, const vi & b) {
#if DW_QUANT_LANES == 16
    return (vi) _mm512_maddubs_epi16((__m512i) a, (__m512i) b);
#else
    return (vi) _mm256_maddubs_epi16((__m256i) a, (__m256i) b);
#endif
}

inline vi add16(const vi & a, const vi & b) {
#if DW_QUANT_LANES == 16
    return (vi) _mm512_add_epi16((__m512i) a, (__m512i) b);
#else
    return (vi) _mm256_add_epi16((__m256i) a, (__m256i) b);
#endif
}

inline vi magnitude(const vi & v) {
#if DW_QUANT_LANES == 16
    return (vi) _mm512_abs_epi8((__m512i) v);
#else
    return (vi) _mm256_abs_epi8((__m256i) v);
#endif
}

// x where v is not negative, else -x
inline vi with_sign(const vi & x, const vi & v) {
#if DW_QUANT_LANES == 16
    return (vi) _mm512_mask_sub_epi8((__m512i) x, _mm512_movepi8_mask((__m512i) v), _mm512_setzero_si512(),
                                     (__m512i) x);
#else
    return (vi) _mm256_sign_epi8((__m256i) x, (__m256i) v);
#endif
}
#endif

} // namespace dw::DW_QUANT_NAMESPACE

#endif // DW_QUANT_LANES
