// dw_expert_slots on CUDA: expert-slots.h. A kernel finds slots, and those of the next layer's guesses (resolve.cuh);
// then many blocks copy what is missing, and others in a second queue what was guessed (copy-streams.h). Where products
// wait for each expert themselves (arrivals.cuh), as in each layer with guesses, both are copied in the second queue,
// which is joined in front of the first layer without. Where products look for their experts, slots are found in a
// third queue. Grids depend on shapes alone; how much there is to copy is read on the device. In the queue of the step
// kernels are launched as ggml's are, before the one in front of them has ended (ggml_cuda_kernel_launch).

#include "ops/door/chain.cuh"
#include "ops/door/launch.h"
#include "ops/expert-slots/copy-streams.h"
#include "ops/expert-slots/expert-slots.h"
#include "ops/expert-slots/resolve.cuh"
#include "ops/expert-slots/staging.cuh"

namespace slots = dw::expert_slots;
namespace parts = dw::layer_parts;

namespace {

using slots::ahead, slots::n_lanes, slots::open_choice, slots::picks, slots::resolve, slots::resolve_modes;

constexpr int n_finding_blocks = 2; // the second one's are of guesses

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
    slots::copy_streams & copies = *next.copies;
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
// later, on an H200: where a third of the experts is missing, both weigh the same. Products of one row may wait for
// slots, so these must find room beside their blocks. The layer before has taken is_found back, with its guesses.
bool can_be_looked_up(const ggml_tensor * dst) {
    const slots::layer & of       = *(const slots::layer *) dw::layer_of(dst);
    const int            n_blocks = slots::blocks_of(dst);
    const bool           has_room = dst->ne[1] > 1 || n_blocks + n_finding_blocks <= dw::n_multiprocessors();
    return n_blocks > 0 && has_room && 3 * of.n_slots >= 2 * of.n_experts && is_guessed(of);
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

// Launches the kernel that finds slots. next: the layer that it guesses for, or nullptr
void find_slots(ggml_tensor * dst, const slots::layer & of, const slots::layer * next, const resolve_modes & as,
                cudaStream_t stream) {
    const ggml_tensor * ids    = dst->src[slots::ids];
    const int           n_used = (int) ids->ne[0], n_rows = (int) ids->ne[1];
    const bool          chooses = slots::has(dst, slots::chooses);
    const auto  open = [&](bool is_own) { return chooses ? open_choice::of(ids, is_own, n_used) : open_choice{}; };
    const ahead coming =
        next ? ahead{ *next, picks::of(dst->src[slots::guesses], slots::number_of(dst), n_used), open(false) }
             : ahead{};
    int n = as.looks ? slots::max_experts : slots::threads_for(of);
    n     = next ? std::max(n, slots::threads_for(*next)) : n;
    if (chooses) { // beside those that look at experts, if there is room
        n = n_rows <= slots::max_guess_rows ? n + n_lanes * n_rows : std::max(n, n_lanes * n_rows);
    }
    const auto      find = chooses ? resolve<true> : resolve<false>;
    const picks     from = picks::of(ids, 0, n_used);
    int32_t * const out  = dw::data_of<int32_t>(dst);
    if (as.is_beside) { // an early start in another queue would cost the step's own 4 us a layer on an H200
        find<<<n_finding_blocks, n, 0, stream>>>(of, from, open(true), out, as, coming);
        CUDA_CHECK(cudaEventRecord(of.copies->is_found, stream));
        of.copies->found = &of;
    } else {
        ggml_cuda_kernel_launch(find, grid(next ? n_finding_blocks : 1, n, stream), of, from, open(true), out, as,
                                coming);
    }
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const slots::layer & of     = *(const slots::layer *) with.layer;
    const int64_t        n_used = dst->ne[0], n_rows = dst->ne[1];
    const bool           looks   = slots::only_looks_up(of, n_used, n_rows);
    const bool           warm_up = n_used >= of.n_experts;
    const bool           staged  = of.stages(n_rows) && !warm_up;
    const bool           is_here = of.staged && slots::join_staged(*of.staged, with.stream) == &of;
    const slots::layer * next    = slots::guessed_by(dst);
    const bool           beside  = of.copies && !looks && !next && slots::has(dst, slots::copies_beside);
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
    find_slots(dst, of, next, { looks, warm_up, staged, are_looked_up, of.copies && of.copies->was_used }, stream);
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
