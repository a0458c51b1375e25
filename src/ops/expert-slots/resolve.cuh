// Slots for the experts that rows chose, and for those that a guess names. Included by expert-slots.cu alone.
// Test: tests/ops/test_cuda_slots.py, tests/gpu/test_expert_pool_cuda.py.

#pragma once

#include "ops/door/launch.h"
#include "ops/expert-slots/arrivals.cuh"
#include "ops/expert-slots/kernels.cuh"
#include "ops/layer-parts/choice.cuh"

namespace dw::expert_slots {

struct picks {
    const int32_t * ids;
    int64_t         row; // stride, in ids
    int             n_used, n_rows;

    // from the first-th of each row on
    static picks of(const ggml_tensor * ids, int first, int n_used) {
        return { dw::data_of<int32_t>(ids) + first, (int64_t) (ids->nb[1] / sizeof(int32_t)), n_used,
                 (int) ids->ne[1] };
    }

    __device__ int n() const { return n_used * n_rows; }
    __device__ int at(int i) const { return ids[i / n_used * row + i % n_used]; }
};

// A choice of rows that is left to this op; no logits: it was made before.
struct open_choice {
    const float * logits; // f32[n, E + 1]
    int32_t *     rows;   // of dw_choice's dst, where this choice begins
    int           n_experts;
    bool          is_own; // not the next layer's

    static open_choice of(const ggml_tensor * ids, bool is_own, int n_used) {
        auto * const  rows = dw::data_of<int32_t>(ids);
        const int64_t n = ids->ne[1], n_experts = (int64_t) (ids->nb[1] / sizeof(int32_t));
        const auto *  logits = (const float *) (rows + layer_parts::choice::logits_at(n_experts, n));
        return { logits + (is_own ? 0 : n * (n_experts + 1)),
                 rows + (is_own ? 0 : layer_parts::choice::next_at(n_used)), (int) n_experts, is_own };
    }
};

struct shared_state {
    int  last[max_experts];  // place of the last pick + 1; of a prompt: how many rows chose it
    int  first[max_experts]; // whether row 0 chose it
    int  slot[max_experts];  // -1: on the host alone
    bool is_on_its_way[max_experts];
    int  n_by_warp[n_lanes];
    room made;

    layer_parts::choice_of_row chosen[layer_parts::max_rows]; // of an open choice
};

// The picks of an open choice, which is made here: by the last warps of the block, one a row.
__device__ inline picks choose(shared_state & s, const open_choice & open, const picks & of) {
    constexpr int row_size = sizeof(layer_parts::choice_of_row) / sizeof(int);
    const int     lane = threadIdx.x % n_lanes, row = threadIdx.x / n_lanes - (blockDim.x / n_lanes - of.n_rows);
    if (row >= 0) {
        layer_parts::choice_of_row & found = s.chosen[row];
        layer_parts::choose_row(open.logits + row * (open.n_experts + 1), open.n_experts, of.n_used, lane,
                                found.experts, open.is_own ? found.weights : nullptr);
        layer_parts::write_choice_row(found, of.n_used, lane, open.is_own, open.rows + row * open.n_experts);
    }
    __syncthreads();
    return { s.chosen[0].experts, row_size, of.n_used, of.n_rows };
}

__device__ inline void count_picks(shared_state & s, const picks & from, bool looks) {
    for (int i = threadIdx.x; i < from.n(); i += blockDim.x) {
        const int e = from.at(i);
        if (looks) {
            atomicAdd(&s.last[e], 1);
        } else {
            atomicMax(&s.last[e], i + 1);
        }
        if (i < from.n_used) {
            s.first[e] = 1;
        }
    }
    __syncthreads();
}

// Nothing waits for these, where reading and writing would wait for memory.
__device__ inline void add(uint64_t & to, int n) {
    if (n > 0) {
        atomicAdd((unsigned long long *) &to, (unsigned long long) n);
    }
}

// guesses of the next layer
struct ahead {
    layer       of;
    picks       from;
    open_choice open;
};

template <bool is_open> __device__ void guess(shared_state & s, const ahead & next) {
    const int   e    = threadIdx.x;
    const bool  is   = e < next.of.n_experts;
    const entry mine = is ? next.of.state->entries[e] : entry{ 0, 0, 0, -1, 0 };
    s.last[e]        = 0;
    if (!is_open) {
        __syncthreads(); // else all meet when the choice is made
    }
    ggml_cuda_pdl_sync();
    count_picks(s, is_open ? choose(s, next.open, next.from) : next.from, false);
    give_guesses(s.made, s.n_by_warp, next.of, mine, s.last[e] > 0);
}

struct resolve_modes {
    bool looks; // it fills nothing
    bool warm_up, staged;
    bool is_beside;  // gate and up run meanwhile
    bool reads_late; // they did in the layer before: its guesses may still be made, so tables are read behind the wait
};

// What the policy keeps of an expert that rows chose.
__device__ inline void keep_use(const shared_state & s, entry & mine, int n_rows, uint32_t step, bool looks,
                                bool warm_up) {
    const int last = s.last[threadIdx.x];
    if (!looks) {
        use(mine, step, last - 1, s.first[threadIdx.x] != 0);
    } else if (!warm_up) {
        const uint64_t share = (uint64_t) heat_of_prompt * last / n_rows;
        add_heat(mine, epoch_of(step), (uint32_t) share);
    }
}

// Where each pick is to be read, by plane.
__device__ inline void write_indices(const shared_state & s, const layer & of, const picks & from, bool staged,
                                     int32_t * dst) {
    for (int i = threadIdx.x; i < from.n(); i += blockDim.x) {
        const int expert = from.at(i);
        for (int plane = 0; plane < of.n_planes; ++plane) {
            const int absent          = staged ? of.first_staged[plane] + expert : expert;
            const int index           = s.slot[expert] < 0 ? absent : of.first_slots[plane] + s.slot[expert];
            dst[plane * from.n() + i] = s.is_on_its_way[expert] ? ~index : index;
        }
    }
}

// One thread, behind all that others wrote for products beside the op.
__device__ inline void tell_found(table & state) {
    __threadfence();
    *(volatile uint32_t *) &state.is_found = 1;
}

// With those that choose beside those that have an expert.
constexpr int most_open_threads = layer_parts::max_experts + n_lanes * max_guess_rows;

// One block, one thread per expert. Extra threads count picks (`looks`) or make the choice. A second block, if present,
// handles the next layer's guesses. The kernel reads the tables before its predecessor has ended. This is safe, because
// every kernel that writes them has ended by then:
// - gate and up of the previous layer release dependents only after the writer has ended (make_hidden_all,
// make_hidden_strips;
//   write_choice if the choice is not open);
// - if copies were queued in between, this launch waits for them;
// - without guesses the last writer ran in the previous step.
// Otherwise resolve_modes::reads_late is set, and tables are read after the wait. Copies that are still on their way
// change only the counters of what has arrived.
template <bool is_open> __global__ void __launch_bounds__(is_open ? most_open_threads : max_experts)
    resolve(const layer of, const picks given, const open_choice open, int32_t * dst, resolve_modes as,
            const ahead next) {
    __shared__ shared_state s;
    const bool              looks = as.looks;
    ggml_cuda_pdl_lc();
    if (as.reads_late) {
        ggml_cuda_pdl_sync();
    }
    if (blockIdx.x == 1) {
        guess<is_open>(s, next);
        return;
    }
    const bool     is_awaited = gridDim.x > 1;
    table &        state      = *of.state;
    const int      e          = threadIdx.x;
    const bool     is         = e < of.n_experts;
    entry          mine       = is ? state.entries[e] : entry{ 0, 0, 0, -1, 0 };
    const uint32_t step       = state.step + (looks ? 0 : 1);
    s.last[e]                 = 0;
    s.first[e]                = 0;
    bool was_on_its_way       = false;
    if (is_awaited) { // seen before the wait: what comes later counts as on its way
        was_on_its_way = mine.slot >= 0 && !has_arrived(state, mine.slot, (1u << of.n_parts) - 1);
        see_arrived();
    }
    if (!is_open) {
        __syncthreads();
    }
    ggml_cuda_pdl_sync();
    const picks from = is_open ? choose(s, open, given) : given;
    count_picks(s, from, looks);

    const bool needed   = is && s.last[e] > 0;
    const bool missing  = needed && mine.slot < 0;
    const int  n_needed = __syncthreads_count(needed);
    const int  n_right  = __syncthreads_count(needed && !looks && mine.guessed == step);
    int        n_misses = __syncthreads_count(missing), n_filled = 0;
    if (!looks && n_misses > 0) {
        const int rank = rank_in_block(s.n_by_warp, missing, n_misses);
        n_filled       = give_slots(s.made, of, mine, needed, missing, rank, n_misses, step, state.fills);
    }
    if (needed) {
        keep_use(s, mine, from.n_rows, step, looks, as.warm_up);
    }
    if (is) {
        state.entries[e]   = mine;
        s.slot[e]          = mine.slot;
        s.is_on_its_way[e] = was_on_its_way || (is_awaited && missing && mine.slot >= 0);
    }
    __syncthreads();
    if (e == 0) {
        state.step    = step;
        state.n_fills = n_filled;
        add(state.counted.n_steps, 1);
        add(state.counted.n_hits, n_needed - n_misses);
        add(state.counted.n_misses, n_filled);
        add(state.counted.n_in_place, n_misses - n_filled);
        add(state.counted.n_right, n_right);
    }
    write_indices(s, of, from, as.staged, dst);
    if (as.is_beside) {
        __syncthreads();
        if (e == 0) {
            tell_found(state);
        }
    }
}

} // namespace dw::expert_slots
