// The best experts of a row by its router's logits, on CUDA: a warp a row.
// Test: tests/gpu/test_layer_parts_cuda.py, tests/gpu/test_expert_pool_cuda.py.

#pragma once

#include "ops/door/lanes.cuh"
#include "ops/layer-parts/rows.cuh"

#include <cstdint>

namespace dw::layer_parts {

// Integers in the order of logits; 1: a NaN; 0: no expert, or one that is taken.
__device__ __forceinline__ uint32_t order_of(float logit) {
    const uint32_t bits = __float_as_uint(logit);
    return isnan(logit) ? 1 : bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// The logit of an order.
__device__ __forceinline__ float logit_of(uint32_t order) {
    return order <= 1 ? NAN : __uint_as_float(order & 0x80000000 ? order & 0x7fffffff : ~order);
}

// An expert in the order of a choice: larger is better, and of equal logits the lowest expert. Unique.
__device__ __forceinline__ uint64_t key_of(uint32_t order, int expert) {
    return (uint64_t) order << 32 | ~(uint32_t) expert;
}

// Keys in descending order: Batcher's odd-even merge sort, with exchanges that are known at compile time.
template <int n, int length = 1, int step = 1> __device__ __forceinline__ void sort_keys(uint64_t (&keys)[n]) {
#pragma unroll
    for (int i = step % length; i + step < n; ++i) {
        if ((i - step % length) / step % 2 == 0 && i / (2 * length) == (i + step) / (2 * length)) {
            const uint64_t a = keys[i], b = keys[i + step];
            keys[i]        = a > b ? a : b;
            keys[i + step] = a > b ? b : a;
        }
    }
    if constexpr (step > 1) {
        sort_keys<n, length, step / 2>(keys);
    } else if constexpr (2 * length < n) {
        sort_keys<n, 2 * length, 2 * length>(keys);
    }
}

// The best n_used experts of a row, best first. weights: theirs and the shared expert's, or nullptr. A warp, of which
// each lane has up to n_of_lane experts: in order, so that the best of all is the best of the lanes' firsts.
template <int n_of_lane> __device__ __forceinline__ void choose_row_of(const float * logits, int n_experts, int n_used,
                                                                       int lane, int * chosen, float * weights) {
    float mine[n_of_lane];
#pragma unroll
    for (int i = 0; i < n_of_lane; ++i) {
        mine[i] = logits[min(lane + 32 * i, n_experts)]; // without a condition: all are asked for before one is there
    }
    const float of_shared = weights ? logits[n_experts] : 0.0f;
    uint64_t    keys[n_of_lane];
#pragma unroll
    for (int i = 0; i < n_of_lane; ++i) {
        const int expert = lane + 32 * i;
        keys[i]          = key_of(expert < n_experts ? order_of(mine[i]) : 0, expert);
    }
    sort_keys(keys);
    uint32_t my_order = 0, my_expert = 0; // of the rank that is this lane's number
#pragma unroll 1
    for (int rank = 0; rank < n_used; ++rank) { // without branches, which lanes would wait for
        const uint32_t order = (uint32_t) (keys[0] >> 32), best = max_of_lanes(order);
        const uint32_t low = order == best ? (uint32_t) keys[0] : 0, lowest = max_of_lanes(low); // of equal ones
        const bool     is_mine = low == lowest;
#pragma unroll
        for (int i = 0; i + 1 < n_of_lane; ++i) {
            keys[i] = is_mine ? keys[i + 1] : keys[i];
        }
        keys[n_of_lane - 1] = is_mine ? 0 : keys[n_of_lane - 1];
        my_order            = rank == lane ? best : my_order;
        my_expert           = rank == lane ? ~lowest : my_expert;
    }
    if (lane < n_used) {
        chosen[lane] = (int) my_expert;
    }
    if (weights) {
        const float logit = logit_of(my_order), first = __shfl_sync(0xffffffff, logit, 0);
        const float e = lane < n_used ? expf(logit - first) : 0.0f, sum = sum_of_lanes(e);
        if (lane <= n_used) {
            weights[lane] = lane < n_used ? e / sum : sigmoid(of_shared);
        }
    }
    __syncwarp();
}

__device__ __forceinline__ void choose_row(const float * logits, int n_experts, int n_used, int lane, int * chosen,
                                           float * weights) {
    if (n_experts <= 256) {
        choose_row_of<8>(logits, n_experts, n_used, lane, chosen, weights);
    } else {
        choose_row_of<max_experts / 32>(logits, n_experts, n_used, lane, chosen, weights);
    }
}

// One row's choice, in shared memory.
struct choice_of_row {
    int   experts[max_used];
    float weights[max_used + 1];
};

// Writes a row as dw_choice's dst has it: experts, and of the layer's own router weights behind them.
__device__ __forceinline__ void write_choice_row(const choice_of_row & from, int n_used, int lane, bool is_own,
                                                 int32_t * out) {
    if (lane < n_used) {
        out[lane] = from.experts[lane];
    }
    if (lane <= n_used && is_own) {
        out[n_used + lane] = __float_as_int(from.weights[lane]);
    }
}

} // namespace dw::layer_parts
