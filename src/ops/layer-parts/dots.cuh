// Dots of one row of weights with a few columns of activations, by one warp. A lane takes the same values of the row
// whatever the number of columns, adds up their products in ascending order, and the lanes' sums are added as a
// butterfly: the bits of a column do not depend on its neighbours.
//
// How a type is unpacked is ggml-cuda's (vecdotq.cuh): vec_dot of a block and an offset gives the dot of `vdr` words.
// Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/layer-parts.h"
#include "vecdotq.cuh"

namespace dw::layer_parts {

// Activations of one row, K values: as products of quantised weights see them, and as they are.
struct column {
    const block_q8_1 * blocks; // [K / 32]
    const float *      values; // [K]
};

__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        x += __shfl_xor_sync(0xffffffff, x, offset);
    }
    return x;
}

template <ggml_type type> constexpr bool are_floats = is_float(type);

template <ggml_type type> struct unpacked;

template <> struct unpacked<GGML_TYPE_Q8_0> {
    static constexpr int   size = QK8_0, words = QI8_0, step = VDR_Q8_0_Q8_1_MMVQ;
    static __device__ auto dot(const void * w, const block_q8_1 * x, int block, int word) {
        return vec_dot_q8_0_q8_1(w, x, block, word);
    }
};

template <> struct unpacked<GGML_TYPE_Q4_K> {
    static constexpr int   size = QK_K, words = QI4_K, step = VDR_Q4_K_Q8_1_MMVQ;
    static __device__ auto dot(const void * w, const block_q8_1 * x, int block, int word) {
        return vec_dot_q4_K_q8_1(w, x, block, word);
    }
};

template <> struct unpacked<GGML_TYPE_Q5_K> {
    static constexpr int   size = QK_K, words = QI5_K, step = VDR_Q5_K_Q8_1_MMVQ;
    static __device__ auto dot(const void * w, const block_q8_1 * x, int block, int word) {
        return vec_dot_q5_K_q8_1(w, x, block, word);
    }
};

template <> struct unpacked<GGML_TYPE_Q6_K> {
    static constexpr int   size = QK_K, words = QI6_K, step = VDR_Q6_K_Q8_1_MMVQ;
    static __device__ auto dot(const void * w, const block_q8_1 * x, int block, int word) {
        return vec_dot_q6_K_q8_1(w, x, block, word);
    }
};

template <> struct unpacked<GGML_TYPE_IQ4_XS> {
    static constexpr int   size = QK_K, words = QI4_XS, step = VDR_IQ4_XS_Q8_1_MMVQ;
    static __device__ auto dot(const void * w, const block_q8_1 * x, int block, int word) {
        return vec_dot_iq4_xs_q8_1(w, x, block, word);
    }
};

// four weights from index i on; i is a multiple of 4
template <ggml_type type> __device__ __forceinline__ float4 four_of(const void * w, int64_t i) {
    if constexpr (type == GGML_TYPE_F32) {
        return *(const float4 *) ((const float *) w + i);
    } else if constexpr (type == GGML_TYPE_F16) {
        const half2 * at = (const half2 *) ((const half *) w + i);
        const float2  a = __half22float2(at[0]), b = __half22float2(at[1]);
        return make_float4(a.x, a.y, b.x, b.y);
    } else {
        const uint2 at = *(const uint2 *) ((const uint16_t *) w + i);
        return make_float4(__uint_as_float(at.x << 16), __uint_as_float(at.x & 0xffff0000), __uint_as_float(at.y << 16),
                           __uint_as_float(at.y & 0xffff0000));
    }
}

__device__ __forceinline__ float add_products(float sum, float4 a, float4 b) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// sums[m][c] += row m of `rows` times columns[c], of this lane's values
template <ggml_type type, int n_rows, int n_columns>
__device__ __forceinline__ void add_dots(float (&sums)[n_rows][n_columns], const char * const (&rows)[n_rows],
                                         const column (&columns)[n_columns], int n_values, int lane) {
    if constexpr (are_floats<type>) {
        for (int i = 4 * lane; i < n_values; i += 128) {
            float4 x[n_columns];
#pragma unroll
            for (int c = 0; c < n_columns; ++c) {
                x[c] = *(const float4 *) (columns[c].values + i);
            }
#pragma unroll
            for (int m = 0; m < n_rows; ++m) {
                const float4 w = four_of<type>(rows[m], i);
#pragma unroll
                for (int c = 0; c < n_columns; ++c) {
                    sums[m][c] = add_products(sums[m][c], w, x[c]);
                }
            }
        }
    } else {
        using of               = unpacked<type>;
        constexpr int n_lanes  = of::words / of::step;                     // of a block
        constexpr int n_ahead  = n_rows * n_columns <= 4 ? 4 / n_rows : 1; // turns whose loads are in flight together
        const int     n_blocks = n_values / of::size, word = of::step * (lane % n_lanes);
#pragma unroll n_ahead
        for (int block = lane / n_lanes; block < n_blocks; block += 32 / n_lanes) {
#pragma unroll
            for (int m = 0; m < n_rows; ++m) {
#pragma unroll
                for (int c = 0; c < n_columns; ++c) {
                    sums[m][c] += of::dot(rows[m], columns[c].blocks + block * (of::size / 32), block, word);
                }
            }
        }
    }
}

// each lane gets the sums of all
template <int n_rows, int n_columns> __device__ __forceinline__ void add_lanes(float (&sums)[n_rows][n_columns]) {
#pragma unroll
    for (int m = 0; m < n_rows; ++m) {
#pragma unroll
        for (int c = 0; c < n_columns; ++c) {
            sums[m][c] = sum_of_lanes(sums[m][c]);
        }
    }
}

template <ggml_type type> struct type_of {
    static constexpr ggml_type value = type;
};

// call(type_of<type>{}) for one of product_types
template <typename call_type> __device__ __forceinline__ void with_type(ggml_type type, call_type && call) {
    switch (type) {
        case GGML_TYPE_F32:
            return call(type_of<GGML_TYPE_F32>{});
        case GGML_TYPE_F16:
            return call(type_of<GGML_TYPE_F16>{});
        case GGML_TYPE_BF16:
            return call(type_of<GGML_TYPE_BF16>{});
        case GGML_TYPE_Q8_0:
            return call(type_of<GGML_TYPE_Q8_0>{});
        case GGML_TYPE_Q4_K:
            return call(type_of<GGML_TYPE_Q4_K>{});
        case GGML_TYPE_Q5_K:
            return call(type_of<GGML_TYPE_Q5_K>{});
        case GGML_TYPE_Q6_K:
            return call(type_of<GGML_TYPE_Q6_K>{});
        case GGML_TYPE_IQ4_XS:
            return call(type_of<GGML_TYPE_IQ4_XS>{});
        default:
            return; // takes() refused it
    }
}

// Ask for the lines of a row in L2, before what it is multiplied with is there.
__device__ __forceinline__ void prefetch(const char * row, int n_bytes, int lane) {
    for (int at = 128 * lane; at < n_bytes; at += 128 * 32) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row + at));
    }
}

} // namespace dw::layer_parts
