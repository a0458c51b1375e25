// Which experts a batch of few rows takes, on CUDA: router, choice, and the rows of each expert.
// Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/rows.cuh"

#include <cstdint>

namespace dw::layer_parts {

constexpr int max_pairs = (int) (max_rows * max_used);

// A row's use of an expert: its number, row * (k + 1) + rank. Rank k is the shared expert's.
using pair_id = uint16_t;

// The choice of a batch, in device memory.
struct routes {
    float   weights[max_rows * (max_used + 1)]; // by pair
    int     n_groups;                           // distinct experts
    int     experts[max_pairs];                 // by group
    int     n_pairs[max_pairs];                 // by group, max_rows at most
    pair_id pairs[max_pairs][max_rows];         // by group
};

// logits [n][E + 1], the last one the shared expert's; h, the rows normalised. A block an expert.
template <ggml_type type> __global__ void route(const float * x, int64_t stride, int n, const float * norm,
                                                float epsilon, const void * router, const void * shared_router,
                                                float * logits, activations h) {
    __shared__ float2 sums[max_rows][32];
    ggml_cuda_pdl_lc();
    const int    expert = blockIdx.x, n_experts = gridDim.x - 1;
    const groups scaled = groups::of<GGML_TYPE_F32>(norm, h.width);
    const size_t bytes  = type == GGML_TYPE_F32 ? sizeof(float) : sizeof(uint16_t);
    const void * row_of_expert =
        expert == n_experts ? shared_router : (const char *) router + (size_t) expert * h.width * bytes;
    const groups weights = groups::of<type>(row_of_expert, h.width).times(scaled);
    ggml_cuda_pdl_sync();
    for (int row = 0; row < n; ++row) {
        const groups values  = groups::of<GGML_TYPE_F32>(x + row * stride, h.width);
        const float  squares = sum_of_lanes(values.dot(values)), product = sum_of_lanes(values.dot(weights));
        if (threadIdx.x % 32 == 0) {
            sums[row][threadIdx.x / 32] = make_float2(squares, product);
        }
    }
    __syncthreads();
    const auto total = [&](int row) {
        float2 sum = make_float2(0.0f, 0.0f);
        for (int warp = 0; warp < (int) blockDim.x / 32; ++warp) {
            sum.x += sums[row][warp].x;
            sum.y += sums[row][warp].y;
        }
        return make_float2(rsqrtf(sum.x / h.width + epsilon), sum.y);
    };
    for (int row = threadIdx.x; row < n; row += blockDim.x) {
        const float2 found                     = total(row);
        logits[row * (n_experts + 1) + expert] = found.y * found.x;
    }
    for (int row = expert; row < n; row += gridDim.x) {
        const groups values = groups::of<GGML_TYPE_F32>(x + row * stride, h.width);
        h.store(row, values.times(scaled), total(row).x);
    }
}

// Integers in the order of logits; 0: a NaN, or an expert that is taken.
__device__ __forceinline__ uint32_t order_of(float logit) {
    const uint32_t bits = __float_as_uint(logit);
    return isnan(logit) ? 1 : bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

__device__ __forceinline__ uint32_t most_of_lanes(uint32_t x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(0xffffffff, x);
#else
    for (int offset = 16; offset > 0; offset /= 2) {
        x = max(x, __shfl_xor_sync(0xffffffff, x, offset));
    }
    return x;
#endif
}

// One row's experts, best first, and their weights. A warp.
__device__ __forceinline__ void choose_row(const float * logits, int n_experts, int n_used, int lane, int * chosen,
                                           float * weights) {
    uint32_t orders[max_experts / 32];
#pragma unroll
    for (int i = 0; i < (int) max_experts / 32; ++i) {
        const int expert = lane + 32 * i;
        orders[i]        = expert < n_experts ? order_of(logits[expert]) : 0;
    }
    float first = 0.0f, sum = 0.0f;
    for (int rank = 0; rank < n_used; ++rank) {
        uint32_t mine = 0;
        int      at   = 0;
#pragma unroll
        for (int i = 0; i < (int) max_experts / 32; ++i) {
            at   = orders[i] > mine ? i : at;
            mine = max(orders[i], mine);
        }
        // of equals the lowest expert
        const uint32_t best   = most_of_lanes(mine);
        const int      expert = (int) ~most_of_lanes(mine == best ? ~(uint32_t) (lane + 32 * at) : 0);
#pragma unroll
        for (int i = 0; i < (int) max_experts / 32; ++i) {
            orders[i] = lane + 32 * i == expert ? 0 : orders[i];
        }
        const float logit = logits[expert];
        first             = rank == 0 ? logit : first;
        const float e     = expf(logit - first);
        sum += e;
        if (lane == 0) {
            chosen[rank]  = expert;
            weights[rank] = e;
        }
    }
    __syncwarp();
    if (lane < n_used) {
        weights[lane] /= sum;
    } else if (lane == n_used) {
        weights[lane] = sigmoid(logits[n_experts]);
    }
}

// One row's choice, in shared memory.
struct choice_of_row {
    int   experts[max_used];
    float weights[max_used + 1];
};

// Puts the pairs of each expert together. The first pair of an expert leads its group; groups follow each other as
// their leaders do. chosen [n_pairs], in shared memory, as `leads` is.
__device__ __forceinline__ void group_pairs(const int * chosen, int n_pairs, int n_used, bool * leads, routes * out) {
    const int pair   = threadIdx.x;
    int       leader = pair, n_before = 0, n_all = 0;
    if (pair < n_pairs) {
        for (int i = 0; i < n_pairs; ++i) {
            const bool is_same = chosen[i] == chosen[pair];
            leader             = is_same && i < leader ? i : leader;
            n_before += is_same && i < pair;
            n_all += is_same;
        }
        leads[pair] = leader == pair;
    }
    __syncthreads();
    if (pair >= n_pairs) {
        return;
    }
    int group = 0;
    for (int i = 0; i < leader; ++i) {
        group += leads[i];
    }
    out->pairs[group][n_before] = (pair_id) (pair / n_used * (n_used + 1) + pair % n_used);
    if (leads[pair]) {
        out->experts[group] = chosen[pair];
        out->n_pairs[group] = n_all;
    }
    if (pair == n_pairs - 1) {
        out->n_groups = group + 1;
        for (int i = leader + 1; i < n_pairs; ++i) {
            out->n_groups += leads[i];
        }
    }
}

// Fills `out`. One block, a warp a row.
static __global__ void choose(const float * logits, int n_experts, int n_used, routes * out) {
    __shared__ int  chosen[max_pairs];
    __shared__ bool leads[max_pairs];
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const int row = threadIdx.x / 32, n_rows = blockDim.x / 32;
    choose_row(logits + row * (n_experts + 1), n_experts, n_used, threadIdx.x % 32, chosen + row * n_used,
               out->weights + row * (n_used + 1));
    __syncthreads();
    group_pairs(chosen, n_rows * n_used, n_used, leads, out);
}

} // namespace dw::layer_parts
