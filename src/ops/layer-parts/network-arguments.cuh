// What kernels of feed-forward networks are given: weights, rows, and the groups of pairs that take one network.
// Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/routing.cuh"

#include <algorithm>

namespace dw::layer_parts {

// weights [K, rows, experts]
struct matrix {
    const char * data;
    int64_t      row_stride, expert_stride; // bytes
    ggml_type    type;
    int          width; // K

    __host__ static matrix from(const ggml_tensor * t) {
        return { (const char *) t->data, (int64_t) t->nb[1], (int64_t) t->nb[2], t->type, (int) t->ne[0] };
    }
    __device__ __forceinline__ const char * row(int expert, int row) const {
        return data + expert * expert_stride + row * row_stride;
    }
};

// An expert's or the shared expert's.
struct network {
    matrix gate, up, down;
    int    first_up; // row of `up`
    int    width;    // hidden values
};

struct arguments {
    network       routed, shared;
    const float * logits; // of one row, which chooses in each kernel, or of rows that look; nullptr: they chose before
    chosen_before before; // if there are no logits, or gate and up alone choose
    int           n_experts;
    routes *      chosen; // of several rows; nullptr: all rows take the shared network, and nothing else
    activations   h;      // rows
    activations   hidden; // by pair
    int           n, n_used;
};

// The most groups that rows make; the shared network's is not counted.
inline int n_groups_of(const arguments & a) {
    return std::min(a.n * a.n_used, a.n_experts);
}

// A group of pairs that take the same network; group -1 is all rows with the shared expert.
struct group {
    const network &   of;
    const arguments & all;
    int               index, expert, n_pairs; // expert: where its weights are
    const pair_id *   pairs;                  // nullptr: those of a row that is alone, or of all rows

    __device__ __forceinline__ static group of_all_rows(const arguments & a) {
        return { a.shared, a, -1, 0, a.n, nullptr };
    }
    __device__ __forceinline__ static group of_rank(const arguments & a, int rank, int expert) {
        return { a.routed, a, rank, expert, 1, nullptr };
    }
    __device__ __forceinline__ static group of_chosen(const arguments & a, int index) { // for gate and up
        return { a.routed, a, index, a.chosen->places[0][index], a.chosen->n_pairs[index], a.chosen->pairs[index] };
    }
    __device__ __forceinline__ int pair(int i) const {
        return index < 0 ? i * (all.n_used + 1) + all.n_used : pairs ? pairs[i] : index;
    }
    __device__ __forceinline__ int row(int i) const { return pair(i) / (all.n_used + 1); }
};

// The choice of a row that is alone, a warp: for gate and up (side 0) where experts of the first n_ranks ranks are, or
// which they are, if these look into a pool's table; for down (side 1) where all are, and their weights. An expert may
// be on its way: see await_rank.
template <int side> __device__ __forceinline__ void choose_alone(const arguments & a, int n_ranks, choice_of_row & to) {
    const int lane    = threadIdx.x % 32;
    bool      chooses = a.logits;
    if (side == 1 && a.before.looks) {
        int is_found = 0;
        if (lane == 0) {
            expert_slots::deadline until;
            is_found = expert_slots::is_found(a.before.waits[side], until);
        }
        chooses = !__shfl_sync(0xffffffff, is_found, 0); // then all are read in host memory
    }
    if (chooses) {
        choose_row(a.logits, a.n_experts, n_ranks, lane, to.experts, side == 0 ? nullptr : to.weights);
    } else if (lane <= a.n_used) {
        to.weights[lane] = a.before.weight(0, lane, a.n_used);
        if (lane < a.n_used) {
            to.experts[lane] = a.before.index(side, 0, lane, a.n_used);
        }
    }
    __syncwarp();
}

// Gate's and up's block of a rank finds its expert, which it chose, in the table. A warp.
__device__ __forceinline__ void find_rank(const arguments & a, int rank, const expert_slots::seen_slots & seen,
                                          choice_of_row & of) {
    const expert_slots::awaited & waits  = a.before.waits[0];
    const int                     expert = of.experts[rank];
    const int                     index  = seen.index(waits, a.n_experts, expert);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        expert_slots::deadline until;
        of.experts[rank] = a.before.when_found(0, index, expert, 0, rank, a.n_used, until);
    }
}

// One thread: waits until the expert of a rank is there, and says where.
template <int side> __device__ __forceinline__ void await_rank(const arguments & a, int rank, choice_of_row & of) {
    expert_slots::deadline until;
    of.experts[rank] = a.before.when_there(side, of.experts[rank], 0, rank, until);
}

// The expert of a rank that a team of gate and up computes, when it is there.
template <bool is_pooled>
__device__ __forceinline__ void choose_for_team(const arguments & a, int rank, const team & by, choice_of_row & own) {
    [[maybe_unused]] expert_slots::seen_slots seen;
    const bool                                looks = is_pooled && a.before.looks;
    if (by.warp == 0) {
        choose_alone<0>(a, rank + 1, own);
        if (is_pooled && !looks && threadIdx.x == 0) {
            await_rank<0>(a, rank, own);
        }
    } else if (looks && by.warp == 1) {
        seen.see(a.before.waits[0], a.n_experts);
    }
    by.meet();
    if (looks) {
        if (by.warp == 1) {
            find_rank(a, rank, seen, own);
        }
        by.meet();
    }
}

} // namespace dw::layer_parts
