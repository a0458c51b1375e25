// Activations before a product: a row's norm, and the blocks of 8 bits that quantised weights are multiplied with.
// Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/dots.cuh"

namespace dw::layer_parts {

constexpr int per_thread = 4; // groups of four values: 16 values of a row a thread

// threads of a block that normalises rows of this width
inline int threads_for(int64_t width) {
    return (int) ((width / (4 * per_thread) + 31) / 32 * 32);
}

// The groups of four that this thread has of a row; those behind its end are zero.
struct groups {
    float4 at[per_thread];

    static __device__ __forceinline__ int index(int i) { return threadIdx.x + i * blockDim.x; }

    template <ggml_type type> static __device__ __forceinline__ groups of(const void * row, int width) {
        groups found;
#pragma unroll
        for (int i = 0; i < per_thread; ++i) {
            found.at[i] = 4 * index(i) < width ? four_of<type>(row, 4 * index(i)) : make_float4(0, 0, 0, 0);
        }
        return found;
    }

    __device__ __forceinline__ groups times(const groups & other) const {
        groups found;
#pragma unroll
        for (int i = 0; i < per_thread; ++i) {
            const float4 a = at[i], b = other.at[i];
            found.at[i] = make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
        }
        return found;
    }

    // this thread's part of it
    __device__ __forceinline__ float dot(const groups & other) const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < per_thread; ++i) {
            sum = add_products(sum, at[i], other.at[i]);
        }
        return sum;
    }
};

// over the 8 lanes that hold a block of 32 values
__device__ __forceinline__ float most_of_block(float x) {
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, offset));
    }
    return x;
}

__device__ __forceinline__ float magnitude(float4 v) {
    return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

__device__ __forceinline__ int packed(float4 v, float scale) {
    const auto round = [&](float x) { return scale == 0.0f ? 0 : (int) roundf(x / scale) & 0xff; };
    return round(v.x) | round(v.y) << 8 | round(v.z) << 16 | round(v.w) << 24;
}

// Writes group `group` of a row, of which this lane has `v`. All 32 lanes call it, for groups that follow each other.
// The sum that ggml's block has beside its scale is left out: no type here reads it.
__device__ __forceinline__ void store(block_q8_1 * blocks, float * values, int group, float4 v, bool is_there) {
    const float scale = most_of_block(is_there ? magnitude(v) : 0.0f) / 127.0f;
    if (!is_there) {
        return;
    }
    block_q8_1 & block            = blocks[group / 8];
    ((int *) block.qs)[group % 8] = packed(v, scale);
    ((float4 *) values)[group]    = v;
    if (group % 8 == 0) {
        block.ds = make_half2(__float2half(scale), __float2half(0.0f));
    }
}

// Writes the row times `scale`.
__device__ __forceinline__ void store(block_q8_1 * blocks, float * values, const groups & row, float scale, int width) {
#pragma unroll
    for (int i = 0; i < per_thread; ++i) {
        const float4 v = row.at[i];
        store(blocks, values, groups::index(i), make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale),
              4 * groups::index(i) < width);
    }
}

// The sum over a block's threads, given the sums of its warps.
__device__ __forceinline__ float sum_of_warps(const float * sums) {
    float sum = 0.0f;
    for (int warp = 0; warp < (int) blockDim.x / 32; ++warp) {
        sum += sums[warp];
    }
    return sum;
}

__device__ __forceinline__ float sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x));
}

__device__ __forceinline__ float silu(float x) {
    return x * sigmoid(x);
}

// Where rows of activations lie in a workspace, n rows of K values.
struct activations {
    block_q8_1 * blocks; // [n][K / 32]
    float *      values; // [n][K]
    int          width;  // K

    static size_t bytes(int64_t n, int64_t width) {
        return (size_t) (n * width) * sizeof(float) + (size_t) (n * width / 32) * sizeof(block_q8_1);
    }
    // at: aligned to 16 bytes
    static activations in(char * at, int64_t n, int64_t width) {
        return { (block_q8_1 *) (at + (size_t) (n * width) * sizeof(float)), (float *) at, (int) width };
    }
    __device__ __forceinline__ column of(int row) const {
        return { blocks + (int64_t) row * (width / 32), values + (int64_t) row * width };
    }
    __device__ __forceinline__ block_q8_1 * blocks_of(int row) const { return blocks + (int64_t) row * (width / 32); }
    __device__ __forceinline__ float *      values_of(int row) const { return values + (int64_t) row * width; }
};

} // namespace dw::layer_parts
