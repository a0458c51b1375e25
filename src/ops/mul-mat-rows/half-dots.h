// Dot products of F16 and BF16 weight rows with rows of f32 activations, a tile of them at a time. Each goes over its
// values in one order, `lanes` sums side by side that are added up at the end, whatever the size of the tile.
// Included by mul-mat-rows.cpp. Tests: tests/ops/test_mul_mat_rows.py, test_contraction.py.

#pragma once

#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "ops/mul-mat-rows/fused.h"
#include "ops/mul-mat-rows/prefetch.h"

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include <algorithm>
#include <cstring>
#include <utility>

namespace dw::half_rows {

// tile_rows x tile_cols sums at a time: as many as registers hold, enough to hide the latency of an FMA. A few columns
// more, up to few_cols, meet half as many rows at once, so that weights are converted once.
#if defined(__AVX512F__)
constexpr int lanes     = 16;
constexpr int tile_rows = 8;
constexpr int tile_cols = 3;
constexpr int few_cols  = 6;
#else
constexpr int lanes     = 8;
constexpr int tile_rows = 4;
constexpr int tile_cols = 2;
constexpr int few_cols  = 4;
#endif

// GCC and Clang split it where SIMD registers are narrower
using vec = float __attribute__((vector_size(lanes * sizeof(float))));

inline vec load_f32(const void * p) {
    vec v;
    std::memcpy(&v, p, sizeof(v));
    return v;
}

// F16 values as f32
inline vec load_f16(const void * p) {
#if defined(__AVX512F__)
    return (vec) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) p));
#elif defined(__F16C__)
    return (vec) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) p));
#elif defined(__ARM_NEON)
    const float16x8_t v       = vld1q_f16((const __fp16 *) p);
    const float32x4_t half[2] = { vcvt_f32_f16(vget_low_f16(v)), vcvt_f32_f16(vget_high_f16(v)) };
    return load_f32(half);
#else
    float out[lanes];
    ggml_cpu_fp16_to_fp32((const ggml_fp16_t *) p, out, lanes);
    return load_f32(out);
#endif
}

// BF16 values as f32: they are the upper halves
inline vec load_bf16(const void * p) {
    uint16_t in[lanes];
    uint32_t out[lanes];
    std::memcpy(in, p, sizeof(in));
    for (int i = 0; i < lanes; ++i) {
        out[i] = (uint32_t) in[i] << 16;
    }
    return load_f32(out);
}

template <ggml_type type> inline vec load_weights(const char * row, int64_t k) {
    if constexpr (type == GGML_TYPE_F16) {
        return load_f16(row + k * sizeof(ggml_fp16_t));
    } else {
        return load_bf16(row + k * sizeof(ggml_bf16_t));
    }
}

template <ggml_type type> inline float weight(const char * row, int64_t k) {
    if constexpr (type == GGML_TYPE_F16) {
        return ggml_fp16_to_fp32(((const ggml_fp16_t *) row)[k]);
    } else {
        return ggml_bf16_to_fp32(((const ggml_bf16_t *) row)[k]);
    }
}

template <int n> struct vector_of {
    typedef float type __attribute__((vector_size(n * sizeof(float)))); // GCC drops it from a dependent `using`
};

// sum of the lanes: the upper half onto the lower until two are left
template <int n> inline float sum(const typename vector_of<n>::type & v) {
    if constexpr (n == 2) {
        return v[0] + v[1];
    } else {
        typename vector_of<n / 2>::type half[2];
        std::memcpy(half, &v, sizeof(half));
        return sum<n / 2>(half[0] + half[1]);
    }
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define DW_HAS_SHUFFLE
#endif
#endif

#ifdef DW_HAS_SHUFFLE
// x and y hold rows of b lanes each; of every row the upper half is added onto the lower, all side by side
template <int b, int... i> inline vec fold(const vec & x, const vec & y, std::integer_sequence<int, i...>) {
    constexpr int h = b / 2;
    return __builtin_shufflevector(x, y, (i / h * b + i % h)...) +
           __builtin_shufflevector(x, y, (i / h * b + i % h + h)...);
}

// the sums of neighbouring lanes
template <int... i> inline void add_pairs(const vec & v, float * out, std::integer_sequence<int, i...>) {
    const auto result = __builtin_shufflevector(v, v, 2 * i...) + __builtin_shufflevector(v, v, (2 * i + 1)...);
    std::memcpy(out, &result, sizeof(result));
}

// the sums of R = lanes / 2 vectors, with the additions of sum<lanes>() in the same order but in half as many steps
template <int b, int R> inline void sums(vec * v, float * out) {
    if constexpr (b > 2) {
        for (int r = 0; r < R; r += 2) {
            v[r / 2] = fold<b>(v[r], v[r + 1], std::make_integer_sequence<int, lanes>());
        }
        sums<b / 2, R / 2>(v, out);
    } else {
        add_pairs(v[0], out, std::make_integer_sequence<int, lanes / 2>());
    }
}
#endif

template <int R> inline void sums(vec * v, float * out) {
#ifdef DW_HAS_SHUFFLE
    if constexpr (R == lanes / 2) {
        return sums<lanes, R>(v, out);
    }
#endif
    for (int r = 0; r < R; ++r) {
        out[r] = sum<lanes>(v[r]);
    }
}

// out[c][r] = sum of acc[c * R + r], as many at a time as sums<lanes / 2> takes
template <int R, int C> inline void all_sums(vec * acc, float * const * out) {
    constexpr int cols = lanes / 2 / R; // at a time
    int           c    = 0;
    if constexpr (cols > 1) {
        for (; c + cols <= C; c += cols) {
            float found[cols * R];
            sums<cols * R>(acc + c * R, found);
            for (int i = 0; i < cols; ++i) {
                std::memcpy(out[c + i], found + i * R, R * sizeof(float));
            }
        }
    }
    for (; c < C; ++c) {
        sums<R>(acc + c * R, out[c]);
    }
}

// out[c][r] = weight row r . x[c] for R rows and C columns: the same sums in the same order, each product fused with
// its sum (fused.h), for every R and C
template <ggml_type type, int R, int C>
inline void dots(int64_t n, const char * weights, size_t stride, const char * const * x, float * const * out) {
    constexpr int64_t per_line = 64 / sizeof(ggml_fp16_t); // weights in a line of the cache
    vec               acc[C * R];
    std::fill_n(acc, C * R, vec{});
    int64_t k = 0;
    for (; k + lanes <= n; k += lanes) {
        for (int r = 0; r < R; ++r) {
            const vec w = load_weights<type>(weights + r * stride, k);
            // weights come from main memory, and a tile of short rows ends before the hardware sees a pattern
            if (k % per_line == 0) {
                prefetch_line(weights + (R + r) * stride + k * sizeof(ggml_fp16_t));
            }
            for (int c = 0; c < C; ++c) {
                acc[c * R + r] = dw::fused(w, load_f32(x[c] + k * sizeof(float)), acc[c * R + r]);
            }
        }
    }
    all_sums<R, C>(acc, out);
    for (int c = 0; c < C; ++c) {
        for (int64_t i = k; i < n; ++i) {
            for (int r = 0; r < R; ++r) {
                out[c][r] = dw::fused(weight<type>(weights + r * stride, i), ((const float *) x[c])[i], out[c][r]);
            }
        }
    }
}

} // namespace dw::half_rows
