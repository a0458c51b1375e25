// The choice of several rows on CUDA: which experts they take together, and which pairs each of these has. Test:
// tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/routing.cuh"

namespace dw::layer_parts {

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

// Logits of a row, or others while these are not there.
struct logits_or_others {
    const float * of_row;
    bool          are_there;

    __device__ __forceinline__ float operator[](int expert) const {
        return are_there ? of_row[expert] : (float) expert;
    }
};

// What a block that chooses has in shared memory.
struct choice_of_rows {
    choice_of_row     found[max_rows];
    choices_by_expert by;
    int               n_groups;
};

// A pass of `choose`. has_logits: else it reads none and writes nothing. in_turns: groups of more than two pairs go
// first.
static __device__ __forceinline__ void choose_once(const float * logits, bool has_logits, bool in_turns,
                                                   const chosen_before & before, int n_experts, int n_used,
                                                   choice_of_rows & of, routes * out) {
    const int       row = threadIdx.x / 32, lane = threadIdx.x % 32, n_ranks = n_used + 1;
    choice_of_row & mine = of.found[row];
    for (int expert = threadIdx.x; expert < n_experts; expert += blockDim.x) {
        of.by.rows[expert] = 0;
    }
    if (threadIdx.x == 0) {
        of.n_groups = 0;
    }
    if (!before.choice || !has_logits) {
        const logits_or_others of_row{ logits + row * (n_experts + 1), has_logits };
        choose_row(of_row, n_experts, n_used, lane, mine.experts, mine.weights);
    } else if (lane <= n_used) {
        mine.weights[lane] = before.weight(row, lane, n_used);
        if (lane < n_used) {
            mine.experts[lane] = before.expert(row, lane);
        }
    }
    __syncthreads();
    if (lane < n_used) {
        of.by.ranks[row][mine.experts[lane]] = (uint8_t) lane;
        atomicOr(&of.by.rows[mine.experts[lane]], 1 << row);
    }
    if (has_logits && lane <= n_used) {
        out->weights[row * n_ranks + lane] = mine.weights[lane];
    }
    __syncthreads();
    for (int turn = 0; turn < (in_turns ? 2 : 1); ++turn) {
        for (int expert = threadIdx.x; expert < n_experts; expert += blockDim.x) {
            const uint32_t rows = of.by.rows[expert];
            if (rows && (!in_turns || (__popc(rows) > 2) == (turn == 0))) {
                const int group = atomicAdd(&of.n_groups, 1); // in any order: a group's result does not depend on it
                if (has_logits) {
                    write_group(group, expert, rows, of.by, before, n_used, out);
                }
            }
        }
        __syncthreads();
    }
    if (has_logits && threadIdx.x == 0) {
        out->n_groups = of.n_groups;
    }
}

// Fills `out`, from logits or from what was chosen before. One block, a warp a row. Up to 8 rows it rehearses ahead of
// its wait, since what runs once waits for its instructions. Beyond, groups of more than two pairs go first, so that a
// warp's extra group is a small one.
static __global__ void __launch_bounds__(32 * max_rows, 2)
    choose(const float * logits, chosen_before before, int n_experts, int n_used, routes * out) {
    __shared__ choice_of_rows of;
    ggml_cuda_pdl_lc();
    const bool is_long = blockDim.x > 8 * 32;
#pragma unroll 1
    for (int pass = is_long ? 1 : 0; pass < 2; ++pass) {
        if (pass == 1) {
            ggml_cuda_pdl_sync();
        }
        choose_once(logits, pass == 1, is_long, before, n_experts, n_used, of, out);
    }
}

} // namespace dw::layer_parts
