// Which experts a batch of few rows takes, on CUDA: their choice from logits, and the rows of each.
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
    float weights[max_rows * (max_used + 1)];       // by pair
    int   n_groups;                                 // distinct experts
    int   places[2][max_pairs];                     // by group, where an expert's gate and up, and its down are
    int   n_pairs[max_pairs];                       // by group, max_rows at most
    alignas(16) pair_id pairs[max_pairs][max_rows]; // by group
};

// What dw_choice and a pool's op said of rows.
struct chosen_before {
    const int32_t * choice; // [n][stride]; nullptr: they did not
    int64_t         stride;
    const int32_t * places[2]; // [n][k], as of routes

    __device__ __forceinline__ int   expert(int row, int rank) const { return choice[row * stride + rank]; }
    __device__ __forceinline__ float weight(int row, int rank, int n_used) const {
        return __int_as_float(choice[row * stride + n_used + rank]);
    }
    __device__ __forceinline__ int index(int side, int row, int rank, int n_used) const {
        return places[side][row * n_used + rank];
    }
};

// Integers in the order of logits; 1: a NaN; 0: no expert, or one that is taken.
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
    uint64_t keys[n_of_lane];
#pragma unroll
    for (int i = 0; i < n_of_lane; ++i) {
        const int expert = lane + 32 * i;
        keys[i]          = key_of(expert < n_experts ? order_of(logits[expert]) : 0, expert);
    }
    const float of_shared = weights ? logits[n_experts] : 0.0f;
    sort_keys(keys);
    uint32_t my_order = 0; // of the rank that is this lane's number
    for (int rank = 0; rank < n_used; ++rank) {
        const uint32_t order = (uint32_t) (keys[0] >> 32), expert = ~(uint32_t) keys[0], best = most_of_lanes(order);
        bool           is_mine = order == best;
        const uint32_t equals  = __ballot_sync(0xffffffff, is_mine);
        if (equals & (equals - 1)) {
            const uint32_t lowest = most_of_lanes(is_mine ? ~expert : 0); // by all lanes
            is_mine               = is_mine && ~expert == lowest;
        }
        if (is_mine) {
            chosen[rank] = (int) expert;
        }
#pragma unroll
        for (int i = 0; i + 1 < n_of_lane; ++i) {
            keys[i] = is_mine ? keys[i + 1] : keys[i];
        }
        keys[n_of_lane - 1] = is_mine ? 0 : keys[n_of_lane - 1];
        my_order            = rank == lane ? best : my_order;
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

// Which rows chose an expert, and at which rank. In shared memory.
struct choices_by_expert {
    int     rows[max_experts]; // a bit a row
    uint8_t ranks[max_rows][max_experts];
};

// Writes which pairs a group has and where its expert is. rows: those that chose it, a bit a row.
__device__ __forceinline__ void write_group(int group, int expert, uint32_t rows, const choices_by_expert & by,
                                            const chosen_before & before, int n_used, routes * out) {
    const int first     = __ffs(rows) - 1;
    out->n_pairs[group] = __popc(rows);
    for (int side = 0; side < 2; ++side) {
        out->places[side][group] = before.choice ? before.index(side, first, by.ranks[first][expert], n_used) : expert;
    }
    for (int i = 0; rows; ++i, rows &= rows - 1) {
        const int row        = __ffs(rows) - 1;
        out->pairs[group][i] = (pair_id) (row * (n_used + 1) + by.ranks[row][expert]);
    }
}

// Fills `out`, from logits or from what was chosen before. One block, a warp a row.
static __global__ void choose(const float * logits, chosen_before before, int n_experts, int n_used, routes * out) {
    __shared__ int               chosen[max_pairs];
    __shared__ choices_by_expert by;
    __shared__ int               n_groups;
    ggml_cuda_pdl_lc();
    const int row = threadIdx.x / 32, lane = threadIdx.x % 32, n_ranks = n_used + 1;
    for (int expert = threadIdx.x; expert < n_experts; expert += blockDim.x) {
        by.rows[expert] = 0;
    }
    if (threadIdx.x == 0) {
        n_groups = 0;
    }
    ggml_cuda_pdl_sync();
    if (!before.choice) {
        choose_row(logits + row * (n_experts + 1), n_experts, n_used, lane, chosen + row * n_used,
                   out->weights + row * n_ranks);
    } else if (lane <= n_used) {
        out->weights[row * n_ranks + lane] = before.weight(row, lane, n_used);
        if (lane < n_used) {
            chosen[row * n_used + lane] = before.expert(row, lane);
        }
    }
    __syncthreads();
    if (lane < n_used) {
        const int expert      = chosen[row * n_used + lane];
        by.ranks[row][expert] = (uint8_t) lane;
        atomicOr(&by.rows[expert], 1 << row);
    }
    __syncthreads();
    // Beyond 8 rows, groups of more than two pairs go first, so that a warp's extra group is a small one.
    const bool in_turns = blockDim.x > 8 * 32;
    for (int turn = 0; turn < (in_turns ? 2 : 1); ++turn) {
        for (int expert = threadIdx.x; expert < n_experts; expert += blockDim.x) {
            const uint32_t rows = by.rows[expert];
            if (rows && (!in_turns || (__popc(rows) > 2) == (turn == 0))) {
                const int group = atomicAdd(&n_groups, 1); // in any order: a group's result does not depend on it
                write_group(group, expert, rows, by, before, n_used, out);
            }
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        out->n_groups = n_groups;
    }
}

// Writes the choice of rows as dw_choice has it. A warp a row; a second block, if there is one, for the next router,
// whose experts stand from next_at on.
// The pool's op reads its table as soon as it starts. An op of the layer before may have changed that, so nothing
// starts here before all in front has ended.
static __global__ void write_choice(const float * logits, int n_experts, int n_used, int32_t * out, int64_t stride,
                                    int next_at) {
    __shared__ choice_of_row found[max_rows];
    ggml_cuda_pdl_sync();
    ggml_cuda_pdl_lc();
    const int row = threadIdx.x / 32, lane = threadIdx.x % 32, n = blockDim.x / 32;
    choose_row(logits + (blockIdx.x * n + row) * (n_experts + 1), n_experts, n_used, lane, found[row].experts,
               found[row].weights);
    out += row * stride + blockIdx.x * next_at;
    if (lane < n_used) {
        out[lane] = found[row].experts[lane];
    }
    if (lane <= n_used && blockIdx.x == 0) {
        out[n_used + lane] = __float_as_int(found[row].weights[lane]);
    }
}

} // namespace dw::layer_parts
