// Random tensors on a card, for as long as the program runs. Must not know: layers.

#pragma once

#include "ggml-cuda/common.cuh"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace chain {

// Device memory for as long as the program runs.
inline void * memory(size_t bytes) {
    void * made;
    CUDA_CHECK(cudaMalloc(&made, bytes + 4096));
    return made;
}

__device__ inline uint32_t random_bits(size_t i, uint32_t seed) {
    uint64_t z = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull;
    z          = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    return (uint32_t) ((z ^ z >> 27) * 0x94D049BB133111EBull >> 20);
}

static __global__ void fill_bits(uint32_t * to, size_t n, uint32_t seed) {
    for (size_t i = blockIdx.x * (size_t) blockDim.x + threadIdx.x; i < n; i += (size_t) gridDim.x * blockDim.x) {
        to[i] = random_bits(i, seed);
    }
}

// uniform in mean +- spread
static __global__ void fill_floats(float * to, size_t n, uint32_t seed, float spread, float mean) {
    for (size_t i = blockIdx.x * (size_t) blockDim.x + threadIdx.x; i < n; i += (size_t) gridDim.x * blockDim.x) {
        to[i] = mean + spread * ((float) (random_bits(i, seed) & 0xffffff) / 8388608.0f - 1.0f);
    }
}

static __global__ void fill_halfs(half * to, size_t n, uint32_t seed) {
    for (size_t i = blockIdx.x * (size_t) blockDim.x + threadIdx.x; i < n; i += (size_t) gridDim.x * blockDim.x) {
        to[i] = __float2half((float) (random_bits(i, seed) & 0xffffff) / 8388608.0f - 1.0f);
    }
}

// scales of blocks of `bytes` bytes; the least value's, if there is one, follows
static __global__ void fill_scales(char * to, size_t n, int bytes, int at, float scale, float least) {
    for (size_t i = blockIdx.x * (size_t) blockDim.x + threadIdx.x; i < n; i += (size_t) gridDim.x * blockDim.x) {
        half * scales = (half *) (to + i * bytes + at);
        scales[0]     = __float2half(scale);
        if (least > 0.0f) {
            scales[1] = __float2half(least);
        }
    }
}

inline uint32_t next_seed = 1;

inline ggml_tensor * tensor(ggml_type type, const std::vector<int64_t> & shape, void * data) {
    auto * made = new ggml_tensor{};
    made->type  = type;
    made->data  = data;
    made->nb[0] = ggml_type_size(type);
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        made->ne[i] = i < (int) shape.size() ? shape[i] : 1;
        if (i > 0) {
            made->nb[i] = i == 1 ? ggml_row_size(type, made->ne[0]) : made->nb[i - 1] * made->ne[i - 1];
        }
    }
    return made;
}

// random values
inline ggml_tensor * floats(const std::vector<int64_t> & shape, float spread = 1.0f, float mean = 0.0f) {
    ggml_tensor * made = tensor(GGML_TYPE_F32, shape, nullptr);
    made->data         = memory(ggml_nbytes(made));
    fill_floats<<<1024, 256>>>((float *) made->data, ggml_nelements(made), next_seed++, spread, mean);
    return made;
}

inline ggml_tensor * halfs(const std::vector<int64_t> & shape) {
    ggml_tensor * made = tensor(GGML_TYPE_F16, shape, nullptr);
    made->data         = memory(ggml_nbytes(made));
    fill_halfs<<<1024, 256>>>((half *) made->data, ggml_nelements(made), next_seed++);
    return made;
}

// values that a graph is given
template <typename value>
inline ggml_tensor * input(ggml_type type, const std::vector<int64_t> & shape, const std::vector<value> & values) {
    ggml_tensor * made = tensor(type, shape, memory(values.size() * sizeof(value)));
    CUDA_CHECK(cudaMemcpy(made->data, values.data(), values.size() * sizeof(value), cudaMemcpyHostToDevice));
    return made;
}

constexpr ggml_type types_of_weights[] = { GGML_TYPE_Q4_K, GGML_TYPE_Q6_K,    GGML_TYPE_Q8_0,
                                           GGML_TYPE_Q3_K, GGML_TYPE_IQ3_XXS, GGML_TYPE_IQ3_S };

// Random weights whose products are about as large as what they multiply, times `gain`. unit: of values of 8 bits.
inline ggml_tensor * weights(ggml_type type, const std::vector<int64_t> & shape, float gain = 1.0f) {
    ggml_tensor * made  = tensor(type, shape, nullptr);
    const size_t  bytes = ggml_nbytes(made), block = ggml_type_size(type);
    made->data       = memory(bytes);
    const float unit = gain * 1.7f / sqrtf((float) shape[0]) / 64.0f;
    fill_bits<<<1024, 256>>>((uint32_t *) made->data, (bytes + 3) / 4, next_seed++);
    if (type == GGML_TYPE_Q4_K) {
        fill_scales<<<1024, 256>>>((char *) made->data, bytes / block, (int) block, 0, unit / 4, 7.5f * unit / 4);
    } else {
        const bool  is_Q6_K = type == GGML_TYPE_Q6_K, is_Q3_K = type == GGML_TYPE_Q3_K;
        const int   at      = is_Q6_K ? 208 : is_Q3_K ? 108 : 0;
        const float of_unit = is_Q6_K ? 1.0f / 18 : type == GGML_TYPE_Q8_0 ? 1.0f : 0.5f;
        fill_scales<<<1024, 256>>>((char *) made->data, bytes / block, (int) block, at, of_unit * unit, 0.0f);
    }
    return made;
}

} // namespace chain
