// Which experts a batch of few rows takes, on CUDA: their choice from logits, and the rows of each.
// Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/expert-slots/arrivals.cuh"
#include "ops/layer-parts/choice.cuh"

#include <cstdint>

namespace dw::layer_parts {

constexpr int max_pairs = (int) (max_rows * max_used);

// A row's use of an expert: its number, row * (k + 1) + rank. Rank k is the shared expert's.
using pair_id = uint16_t;

// What gate and up need of a group: a warp reads it at once, a word a lane.
struct alignas(16) group_record {
    int     place, n_pairs; // of gate and up; 0 pairs: no group has this number
    pair_id pairs[max_rows];
};

// The choice of a batch, in device memory.
struct routes {
    float weights[max_rows * (max_used + 1)];       // by pair
    int   n_groups;                                 // distinct experts
    int   places[2][max_pairs];                     // by group, where an expert's gate and up, and its down are
    int   n_pairs[max_pairs];                       // by group, max_rows at most
    alignas(16) pair_id pairs[max_pairs][max_rows]; // by group
    group_record records[max_pairs];                // by group, and behind the last one
};

// What dw_choice and a pool's op said of rows.
struct chosen_before {
    const int32_t *       choice; // [n][stride]; nullptr: they did not
    int64_t               stride;
    const int32_t *       places[2]; // [n][k], as of routes; complemented where an expert is on its way
    expert_slots::awaited waits[2];  // by side
    bool                  looks;     // gate and up choose, and look into the table, while this is written

    __device__ __forceinline__ int   expert(int row, int rank) const { return choice[row * stride + rank]; }
    __device__ __forceinline__ float weight(int row, int rank, int n_used) const {
        return __int_as_float(choice[row * stride + n_used + rank]);
    }
    __device__ __forceinline__ int index(int side, int row, int rank, int n_used) const {
        return places[side][row * n_used + rank];
    }
    // where the expert of an index is, once it is there
    __device__ __forceinline__ int when_there(int side, int index, int row, int rank,
                                              expert_slots::deadline & until) const {
        return index < 0 ? expert_slots::wait_for(waits[side], index, expert(row, rank), until) : index;
    }
    // where an expert is, of which seen_slots has an index, once it is there
    __device__ __forceinline__ int when_found(int side, int seen, int expert, int row, int rank, int n_used,
                                              expert_slots::deadline & until) const {
        int index = seen;
        if (seen == expert_slots::not_seen) {
            if (!expert_slots::is_found(waits[side], until)) {
                return expert;
            }
            index = *(const volatile int32_t *) (places[side] + row * n_used + rank);
        }
        return index < 0 ? expert_slots::wait_for(waits[side], index, expert, until) : index;
    }
};

// Which rows chose an expert, and at which rank. In shared memory.
struct choices_by_expert {
    int     rows[max_experts]; // a bit a row
    uint8_t ranks[max_rows][max_experts];
    int     slots[max_experts]; // as seen in a pool's table
    bool    are_filled;         // nothing was on its way into any of these

    // A warp.
    __device__ __forceinline__ void see(const expert_slots::awaited & of, int n_experts) {
        for (int expert = threadIdx.x % 32; expert < n_experts; expert += 32) {
            slots[expert] = expert_slots::slot_now(*of.state, expert);
        }
        __threadfence(); // a slot that was seen was given before
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            are_filled = expert_slots::is_filled(of);
        }
    }
};

// Writes which pairs a group has and where its expert is. rows: those that chose it, a bit a row.
__device__ __forceinline__ void write_group(int group, int expert, uint32_t rows, const choices_by_expert & by,
                                            const chosen_before & before, int n_used, routes * out,
                                            expert_slots::deadline & until) {
    const int  first = __ffs(rows) - 1;
    const auto place = [&](int side) {
        const int rank = by.ranks[first][expert];
        if (before.looks) {
            const int index = before.waits[side].index(by.slots[expert], by.are_filled);
            return before.when_found(side, index, expert, first, rank, n_used, until);
        }
        return before.choice ? before.when_there(side, before.index(side, first, rank, n_used), first, rank, until)
                             : expert;
    };
    group_record & record = out->records[group];
    out->places[0][group] = record.place = place(0);
    out->places[1][group]                = place(1);
    out->n_pairs[group] = record.n_pairs = __popc(rows);
    for (int i = 0; rows; ++i, rows &= rows - 1) {
        const int     row    = __ffs(rows) - 1;
        const pair_id pair   = (pair_id) (row * (n_used + 1) + by.ranks[row][expert]);
        out->pairs[group][i] = record.pairs[i] = pair;
    }
}

// Fills `out`, from logits or from what was chosen before. One block, a warp a row. It waits for experts that are on
// their way, and lets the next kernel start behind that. It may look into a pool's table for itself (arrivals.cuh).
static __global__ void choose(const float * logits, chosen_before before, int n_experts, int n_used, routes * out) {
    __shared__ int               chosen[max_pairs];
    __shared__ choices_by_expert by;
    __shared__ int               n_groups;
    const bool                   awaits = before.waits[0].state;
    expert_slots::deadline       until;
    if (!awaits) {
        ggml_cuda_pdl_lc();
    }
    const int row = threadIdx.x / 32, lane = threadIdx.x % 32, n_ranks = n_used + 1;
    const int n = (int) blockDim.x / 32 - before.looks; // one more warp looks into the table
    for (int expert = threadIdx.x; expert < n_experts; expert += blockDim.x) {
        by.rows[expert] = 0;
    }
    if (threadIdx.x == 0) {
        n_groups = 0;
    }
    ggml_cuda_pdl_sync();
    if (row == n) {
        by.see(before.waits[0], n_experts);
    } else if (!before.choice || before.looks) {
        choose_row(logits + row * (n_experts + 1), n_experts, n_used, lane, chosen + row * n_used,
                   out->weights + row * n_ranks);
    } else if (lane <= n_used) {
        out->weights[row * n_ranks + lane] = before.weight(row, lane, n_used);
        if (lane < n_used) {
            chosen[row * n_used + lane] = before.expert(row, lane);
        }
    }
    __syncthreads();
    if (row < n && lane < n_used) {
        const int expert      = chosen[row * n_used + lane];
        by.ranks[row][expert] = (uint8_t) lane;
        atomicOr(&by.rows[expert], 1 << row);
    }
    __syncthreads();
    // Beyond 8 rows, groups of more than two pairs go first, so that a warp's extra group is a small one.
    const bool in_turns = n > 8;
    for (int turn = 0; turn < (in_turns ? 2 : 1); ++turn) {
        for (int expert = threadIdx.x; expert < n_experts; expert += blockDim.x) {
            const uint32_t rows = by.rows[expert];
            if (rows && (!in_turns || (__popc(rows) > 2) == (turn == 0))) {
                const int group = atomicAdd(&n_groups, 1); // in any order: a group's result does not depend on it
                write_group(group, expert, rows, by, before, n_used, out, until);
            }
        }
        __syncthreads();
    }
    if (awaits) {
        ggml_cuda_pdl_lc();
    }
    if (threadIdx.x == 0) {
        out->n_groups = n_groups;
    }
    for (int i = n_groups + threadIdx.x; i < n_used * n; i += blockDim.x) {
        out->records[i].n_pairs = 0;
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
    write_choice_row(found[row], n_used, lane, blockIdx.x == 0, out + row * stride + blockIdx.x * next_at);
}

} // namespace dw::layer_parts
