// a * b + c with one rounding where the CPU has the instruction, with two where it has none: the same in every place
// of one build. `acc += a * b` would leave the choice to the compiler, which may make another one wherever it inlines
// the expression. Builds use -ffp-contract=off as well (cmake/cpu-variants.cmake).
// Test: tests/ops/test_contraction.py.

#pragma once

#if defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include <cmath>
#include <cstring>

namespace dw {

#if defined(__FMA__) || defined(__AVX512F__) || defined(__ARM_FEATURE_FMA) || defined(FP_FAST_FMAF)
#define DW_FUSES
#endif

inline float fused(float a, float b, float c) {
#ifdef DW_FUSES
    return std::fma(a, b, c); // an instruction: the target has it
#else
    return a * b + c;
#endif
}

// Vec: a GCC vector of floats, of any length
template <typename Vec> inline Vec fused(const Vec & a, const Vec & b, const Vec & c) {
#ifndef DW_FUSES
    return a * b + c;
#else
#if defined(__AVX512F__)
    if constexpr (sizeof(Vec) == sizeof(__m512)) {
        return (Vec) _mm512_fmadd_ps((__m512) a, (__m512) b, (__m512) c);
    }
#endif
#if defined(__FMA__)
    if constexpr (sizeof(Vec) == sizeof(__m256)) {
        return (Vec) _mm256_fmadd_ps((__m256) a, (__m256) b, (__m256) c);
    }
#endif
    Vec out;
#if defined(__ARM_NEON) && defined(__ARM_FEATURE_FMA)
    constexpr int part = 4;
    for (size_t i = 0; i < sizeof(Vec) / sizeof(float); i += part) {
        const float32x4_t sum = vfmaq_f32(vld1q_f32((const float *) &c + i), vld1q_f32((const float *) &a + i),
                                          vld1q_f32((const float *) &b + i));
        vst1q_f32((float *) &out + i, sum);
    }
#else
    for (size_t i = 0; i < sizeof(Vec) / sizeof(float); ++i) {
        out[i] = std::fma(a[i], b[i], c[i]);
    }
#endif
    return out;
#endif
}

} // namespace dw
