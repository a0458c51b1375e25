// Dots of a few rows of float weights with a few columns of activations, by one warp. A lane takes the same values of a
// row whatever the number of columns, adds up their products in ascending order, and the lanes' sums are added as a
// butterfly: the bits of a column do not depend on its neighbours. Quantised weights: tiles.cuh.
// Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "common.cuh"
#include "ops/door/ptx.cuh"
#include "ops/layer-parts/layer-parts.h"

namespace dw::layer_parts {

__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        x += __shfl_xor_sync(0xffffffff, x, offset);
    }
    return x;
}

__device__ __forceinline__ float most_of_lanes(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, offset));
    }
    return x;
}

template <ggml_type type> constexpr bool are_floats = is_float(type);

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

// sums[m][c] += row m of `rows` times columns[c], n_values each, of this lane's values
template <ggml_type type, int n_rows, int n_columns>
__device__ __forceinline__ void add_dots(float (&sums)[n_rows][n_columns], const char * const (&rows)[n_rows],
                                         const float * const (&columns)[n_columns], int n_values, int lane) {
    constexpr int n_ahead = n_columns * n_rows <= 2 ? 4 : 1; // turns whose loads are in flight together
#pragma unroll n_ahead
    for (int i = 4 * lane; i < n_values; i += 128) {
        float4 x[n_columns];
#pragma unroll
        for (int c = 0; c < n_columns; ++c) {
            x[c] = *(const float4 *) (columns[c] + i);
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

// call(type_of<type>{}) for one of direct_types. has_byte_tiles: or with byte_tiles for others; kernels that meet none
// of these must not have the code, which costs them registers.
template <bool has_byte_tiles, typename call_type>
__device__ __forceinline__ void with_type(ggml_type type, call_type && call) {
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
        default: // takes() refused others
            if constexpr (has_byte_tiles) {
                call(type_of<byte_tiles>{});
            }
    }
}

// Asks for the lines of n_bytes in L2, before they are needed: this thread's of n_threads.
__device__ __forceinline__ void prefetch(const void * from, int n_bytes, int thread, int n_threads) {
    for (int at = 128 * thread; at < n_bytes; at += 128 * n_threads) {
        ptx::prefetch_l2((const char *) from + at);
    }
}

} // namespace dw::layer_parts
