// dw_expert_slots on CUDA: expert-slots.h. One block finds slots, and a second one those of the next layer's guesses;
// then many blocks copy what is missing, and others in a second queue what was guessed (beside.h). Where products wait
// for each expert themselves (arrivals.cuh), as in each layer with guesses, both are copied in the second queue, which
// is joined in front of the first layer without. Grids depend on shapes alone; how much there is to copy is read on the
// device. In the queue of the step kernels are launched as ggml's are, before the one in front of them has ended
// (ggml_cuda_kernel_launch). Products that read slots wait for them before they read anything.

#include "ops/door/launch.h"
#include "ops/expert-slots/arrivals.cuh"
#include "ops/expert-slots/beside.h"
#include "ops/expert-slots/expert-slots.h"
#include "ops/expert-slots/kernels.cuh"
#include "ops/expert-slots/staging.cuh"
#include "ops/layer-parts/choice.cuh"

namespace slots = dw::expert_slots;
namespace parts = dw::layer_parts;

namespace {

using slots::n_lanes;
using slots::rank_in_block;

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
        const auto *  logits = (const float *) (rows + parts::choice::logits_at(n_experts, n));
        return { logits + (is_own ? 0 : n * (n_experts + 1)), rows + (is_own ? 0 : parts::choice::next_at(n_used)),
                 (int) n_experts, is_own };
    }
};

struct shared_state {
    int         last[slots::max_experts];  // place of the last pick + 1; of a prompt: how many rows chose it
    int         first[slots::max_experts]; // whether row 0 chose it
    int         slot[slots::max_experts];  // -1: on the host alone
    bool        is_on_its_way[slots::max_experts];
    int         n_by_warp[n_lanes];
    slots::room made;

    parts::choice_of_row chosen[parts::max_rows]; // of an open choice
};

// The picks of an open choice, which is made here: by the last warps of the block, one a row.
__device__ picks choose(shared_state & s, const open_choice & open, const picks & of) {
    constexpr int row_size = sizeof(parts::choice_of_row) / sizeof(int);
    const int     lane = threadIdx.x % n_lanes, row = threadIdx.x / n_lanes - (blockDim.x / n_lanes - of.n_rows);
    if (row >= 0) {
        parts::choice_of_row & found = s.chosen[row];
        parts::choose_row(open.logits + row * (open.n_experts + 1), open.n_experts, of.n_used, lane, found.experts,
                          open.is_own ? found.weights : nullptr);
        parts::write_choice_row(found, of.n_used, lane, open.is_own, open.rows + row * open.n_experts);
    }
    __syncthreads();
    return { s.chosen[0].experts, row_size, of.n_used, of.n_rows };
}

__device__ void count_picks(shared_state & s, const picks & from, bool looks) {
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
__device__ void add(uint64_t & to, int n) {
    if (n > 0) {
        atomicAdd((unsigned long long *) &to, (unsigned long long) n);
    }
}

// guesses of the next layer
struct ahead {
    slots::layer of;
    picks        from;
    open_choice  open;
};

template <bool is_open> __device__ void guess(shared_state & s, const ahead & next) {
    const int          e    = threadIdx.x;
    const bool         is   = e < next.of.n_experts;
    const slots::entry mine = is ? next.of.state->entries[e] : slots::entry{ 0, 0, 0, -1, 0 };
    s.last[e]               = 0;
    if (!is_open) {
        __syncthreads(); // else all meet when the choice is made
    }
    ggml_cuda_pdl_sync();
    count_picks(s, is_open ? choose(s, next.open, next.from) : next.from, false);
    slots::give_guesses(s.made, s.n_by_warp, next.of, mine, s.last[e] > 0);
}

struct resolve_modes {
    bool looks; // it fills nothing
    bool warm_up, staged;
    bool is_beside;  // gate and up run meanwhile
    bool reads_late; // they did in the layer before: its guesses may still be made, so tables are read behind the wait
};

// With those that choose beside those that have an expert.
constexpr int most_open_threads = parts::max_experts + n_lanes * slots::max_guess_rows;

// One block, a thread an expert; more threads than experts may count picks (`looks`), or choose. A second block, if
// there is one, has the next layer's guesses. Tables are read before the kernel in front has ended. No kernel that may
// still run then changes them: what changed them last has ended before gate and up of the layer before let a kernel
// start (hide_all, hide_strips; write_choice, where the choice is not open), before the copies that this launch comes
// behind, or, without guesses, in the step before: its last kernels, and the copies of this step's inputs, lie between.
// Copies that still run count what has arrived, and nothing else.
template <bool is_open> __global__ void __launch_bounds__(is_open ? most_open_threads : slots::max_experts)
    resolve(const slots::layer of, const picks given, const open_choice open, int32_t * dst, resolve_modes as,
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
    slots::table & state      = *of.state;
    const int      e          = threadIdx.x;
    const bool     is         = e < of.n_experts;
    slots::entry   mine       = is ? state.entries[e] : slots::entry{ 0, 0, 0, -1, 0 };
    const uint32_t step       = state.step + (looks ? 0 : 1);
    s.last[e]                 = 0;
    s.first[e]                = 0;
    bool was_on_its_way       = false;
    if (is_awaited) { // seen before the wait: what comes later counts as on its way
        was_on_its_way = mine.slot >= 0 && !slots::has_arrived(state, mine.slot, (1u << of.n_parts) - 1);
        slots::see_arrived();
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
        n_filled       = slots::give_slots(s.made, of, mine, needed, missing, rank, n_misses, step, state.fills);
    }
    if (needed && looks && !as.warm_up) {
        const uint64_t share = (uint64_t) slots::heat_of_prompt * s.last[e] / from.n_rows;
        slots::add_heat(mine, slots::epoch_of(step), (uint32_t) share);
    } else if (needed && !looks) {
        slots::use(mine, step, s.last[e] - 1, s.first[e] != 0);
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
    for (int i = threadIdx.x; i < from.n(); i += blockDim.x) {
        const int expert = from.at(i);
        for (int plane = 0; plane < of.n_planes; ++plane) {
            const int absent          = as.staged ? of.first_staged[plane] + expert : expert;
            const int index           = s.slot[expert] < 0 ? absent : of.first_slots[plane] + s.slot[expert];
            dst[plane * from.n() + i] = s.is_on_its_way[expert] ? ~index : index;
        }
    }
    if (as.is_beside) {
        __syncthreads();
        if (e == 0) {
            __threadfence(); // what all have written
            *(volatile uint32_t *) &state.is_found = 1;
        }
    }
}

template <typename Word> __global__ void fill_slots(const slots::layer of) {
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    slots::copy_listed<Word>(of, of.state->fills, of.state->n_fills);
}

// experts of this layer were fetched ahead in this graph
bool is_guessed(const slots::layer & of) {
    return of.copies && of.copies->guessed == &of;
}

ggml_cuda_kernel_launch_params grid(int n_blocks, int n_threads, cudaStream_t stream) {
    return { dim3(n_blocks), dim3(n_threads), (size_t) 0, stream };
}

void copy_missing(const slots::layer & of, cudaStream_t stream) {
    const auto copy = slots::in_words_of(of, sizeof(uint4)) ? fill_slots<uint4> : fill_slots<uint16_t>;
    ggml_cuda_kernel_launch(copy, grid(slots::n_fill_blocks, slots::n_fill_threads, stream), of);
}

// What is queued in `to` from now on comes behind what is queued in `from`.
cudaStream_t fork(cudaEvent_t is_there, cudaStream_t from, cudaStream_t to) {
    CUDA_CHECK(cudaEventRecord(is_there, from));
    CUDA_CHECK(cudaStreamWaitEvent(to, is_there, 0));
    return to;
}

// Those that were fetched for this layer are there before what comes next in the queue of the step.
void join_guesses(const slots::layer & of, cudaStream_t stream) {
    if (is_guessed(of)) {
        CUDA_CHECK(cudaStreamWaitEvent(stream, of.copies->is_fetched, 0));
        of.copies->guessed = nullptr;
    }
}

// Missing experts of a layer and guesses of the next one, beside the step. The copies of this layer's guesses are in
// the same queue, in front.
void copy_beside(const slots::layer & of, const slots::layer & next, cudaStream_t stream) {
    slots::beside & copies = *next.copies;
    slots::launch_fill_and_fetch(of, next, fork(copies.is_chosen, stream, copies.stream));
    CUDA_CHECK(cudaEventRecord(copies.is_fetched, copies.stream));
    copies.guessed      = &next;
    copies.is_made_here = false;
}

// Whether ids are the first of a dw_choice that lies here as a whole, with its logits.
bool can_choose(const ggml_tensor * dst) {
    const slots::layer & of  = *(const slots::layer *) dw::layer_of(dst);
    const ggml_tensor *  ids = dst->src[slots::ids], *whole = ids;
    while (whole->view_src) {
        whole = whole->view_src;
    }
    const int64_t n_used = ids->ne[0], n = ids->ne[1];
    const bool    is_known = n <= parts::max_rows && n_used <= parts::max_used && of.n_experts <= parts::max_experts &&
                          !slots::only_looks_up(of, n_used, n);
    const bool guesses_alike = !dst->src[slots::guesses] || !of.next || of.next->n_experts == of.n_experts;
    return is_known && guesses_alike && ids->nb[1] == of.n_experts * sizeof(int32_t) &&
           ggml_nbytes(whole) >= parts::choice::h_at(of.n_experts, n) * sizeof(int32_t);
}

// Whether slots are found beside products that look into the table. These then begin 3 us earlier, and copies 5 us
// later, on an H200: where a third of the experts is missing, both weigh the same.
bool can_be_looked_up(const ggml_tensor * dst) {
    const slots::layer & of        = *(const slots::layer *) dw::layer_of(dst);
    const bool           has_most  = 3 * of.n_slots >= 2 * of.n_experts;
    const bool           was_reset = is_guessed(of) && !of.copies->is_made_here; // is_found was
    return slots::has(dst, slots::products_look) && has_most && was_reset;
}

bool takes(const ggml_tensor * dst) {
    const slots::layer & of  = *(const slots::layer *) dw::layer_of(dst);
    const ggml_tensor *  ids = dst->src[slots::ids], *guesses = dst->src[slots::guesses];
    const auto are_ids = [](const ggml_tensor * t) { return t->type == GGML_TYPE_I32 && t->nb[0] == sizeof(int32_t); };
    return dst->type == GGML_TYPE_I32 && ggml_is_contiguous(dst) && are_ids(ids) &&
           (!slots::has(dst, slots::chooses) || can_choose(dst)) &&
           (!guesses ||
            (!slots::only_looks_up(of, ids->ne[0], ids->ne[1]) && are_ids(guesses) &&
             guesses->ne[1] <= slots::max_guess_rows && guesses->ne[0] >= slots::number_of(dst) + ids->ne[0]));
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const ggml_tensor *  ids     = dst->src[slots::ids];
    const slots::layer & of      = *(const slots::layer *) with.layer;
    const int            n_used  = (int) ids->ne[0];
    const int            n_rows  = (int) ids->ne[1];
    const bool           looks   = slots::only_looks_up(of, n_used, n_rows);
    const bool           warm_up = n_used >= of.n_experts;
    const bool           staged  = of.stages(n_rows) && !warm_up;
    const bool           chooses = slots::has(dst, slots::chooses);
    const picks          from    = picks::of(ids, 0, n_used);
    const auto open    = [&](bool is_own) { return chooses ? open_choice::of(ids, is_own, n_used) : open_choice{}; };
    const bool is_here = of.staged && slots::join_staged(*of.staged, with.stream) == &of;
    const slots::layer * next   = slots::guessed_by(dst);
    const bool           beside = of.copies && !looks && !next && slots::has(dst, slots::copies_beside);
    if (!beside && (!next || (is_guessed(of) && of.copies->is_made_here))) {
        join_guesses(of, with.stream); // the table is as they leave it, and their slots may be given away again
    }
    if (staged) {
        slots::copy_ahead(of, dst, is_here, with.stream);
    }
    const bool   are_looked_up = next && can_be_looked_up(dst);
    cudaStream_t stream        = with.stream;
    if (beside) { // the step goes on with the nodes that stand before dw_expert_ready
        stream = fork(of.copies->is_chosen, with.stream, of.copies->stream);
    } else if (are_looked_up) { // and here with gate and up
        stream = fork(of.copies->is_chosen, with.stream, of.copies->finding);
    }
    const ahead coming =
        next ? ahead{ *next, picks::of(dst->src[slots::guesses], slots::number_of(dst), n_used), open(false) }
             : ahead{};
    int n = looks ? slots::max_experts : slots::threads_for(of);
    n     = next ? std::max(n, slots::threads_for(*next)) : n;
    if (chooses) { // beside those that look at experts, if there is room
        n = n_rows <= slots::max_guess_rows ? n + n_lanes * n_rows : std::max(n, n_lanes * n_rows);
    }
    const resolve_modes as{ looks, warm_up, staged, are_looked_up, of.copies && of.copies->was_used };
    const auto          find = chooses ? resolve<true> : resolve<false>;
    int32_t * const     out  = dw::data_of<int32_t>(dst);
    if (are_looked_up) { // an early start in another queue would cost the step's own 4 us a layer on an H200
        find<<<2, n, 0, stream>>>(of, from, open(true), out, as, coming);
        CUDA_CHECK(cudaEventRecord(of.copies->is_found, stream));
        of.copies->found = &of;
    } else {
        ggml_cuda_kernel_launch(find, grid(next ? 2 : 1, n, stream), of, from, open(true), out, as, coming);
    }
    if (of.copies) {
        of.copies->was_used = are_looked_up;
    }
    if (next) {
        copy_beside(of, *next, stream);
    } else if (!looks) {
        copy_missing(of, stream);
    }
    if (beside) {
        CUDA_CHECK(cudaEventRecord(of.copies->is_filled, stream));
        of.copies->is_open = true;
    }
}

bool takes_ready(const ggml_tensor * dst) {
    return dst->type == GGML_TYPE_I32;
}

void launch_ready(const dw::launch_context & with, ggml_tensor *) {
    const slots::layer & of = *(const slots::layer *) with.layer;
    if (of.copies && of.copies->is_open) {
        CUDA_CHECK(cudaStreamWaitEvent(with.stream, of.copies->is_filled, 0));
        of.copies->is_open = false;
        of.copies->guessed = is_guessed(of) ? nullptr : of.copies->guessed;
    }
}

} // namespace

const dw::op_descriptor dw::expert_slots::ready_on_cuda = { dw::expert_slots::ready_signature, nullptr, takes_ready,
                                                            nullptr, launch_ready };

const dw::op_descriptor dw::expert_slots::on_cuda = { dw::expert_slots::signature, nullptr, takes, nullptr, launch };
