// The transform of hadamard.h by a warp. Must not know: what is transformed. Test: tests/ops/layer_kernels.py.

#pragma once

#include "common.cuh"

namespace dw::layer_parts {

// Sums and differences of the pairs of values that are `offset` lanes apart.
template <int n_values> __device__ __forceinline__ void add_and_subtract_lanes(float (&x)[n_values], int offset) {
    const bool is_second = threadIdx.x & offset;
#pragma unroll
    for (float & mine : x) {
        const float other = __shfl_xor_sync(0xffffffff, mine, offset);
        mine              = is_second ? other - mine : mine + other;
    }
}

// The same of those that are `offset` apart in a lane.
template <int n_values> __device__ __forceinline__ void add_and_subtract(float (&x)[n_values], int offset) {
#pragma unroll
    for (int i = 0; i < n_values; ++i) {
        if ((i & offset) == 0) {
            const float a = x[i], b = x[i + offset];
            x[i]          = a + b;
            x[i + offset] = a - b;
        }
    }
}

// Transforms each block of n values, n a power of two from 32 to 32 n_values. A lane has value lane + 32 j in x[j]. All
// lanes call it.
template <int n_values> __device__ __forceinline__ void apply_hadamard(float (&x)[n_values], int n) {
#pragma unroll 1
    for (int offset = 1; offset < 32; offset *= 2) {
        add_and_subtract_lanes(x, offset);
    }
#pragma unroll
    for (int offset = 1; offset < n_values; offset *= 2) {
        if (32 * offset < n) {
            add_and_subtract(x, offset);
        }
    }
    const float scale = 1.0f / sqrtf((float) n);
#pragma unroll
    for (float & mine : x) {
        mine *= scale;
    }
}

// Transforms each block of 64 values, which 16 lanes hold, four adjacent ones each.
__device__ __forceinline__ void apply_hadamard_of_64(float (&x)[4]) {
    add_and_subtract(x, 1);
    add_and_subtract(x, 2);
#pragma unroll
    for (int offset = 1; offset < 16; offset *= 2) {
        add_and_subtract_lanes(x, offset);
    }
#pragma unroll
    for (float & mine : x) {
        mine *= 0.125f;
    }
}

} // namespace dw::layer_parts
