// dw_expert_guess on CUDA: guess.h. All of it runs in the queue of the copies: what the next router makes of this
// layer's input, the experts that it would choose, their copies. The step goes on meanwhile. If it writes over that
// input before it was read, the guesses are wrong, and nothing else is: waiting would cost each layer more.

#include "ops/door/launch.h"
#include "ops/expert-slots/copy-streams.h"
#include "ops/expert-slots/guess.h"
#include "ops/expert-slots/kernels.cuh"

namespace slots = dw::expert_slots;

namespace {

using slots::n_lanes;

constexpr int n_logit_warps = 8; // of a block, an expert each

struct rows {
    const float * values;
    int64_t       stride; // in values
    int           n_embd, n;
};

// logits f32[R, E]
__global__ void guess_logits(const rows from, const float * norm, const float * router, int n_experts, float * logits) {
    const int expert = blockIdx.x * n_logit_warps + threadIdx.x / n_lanes, lane = threadIdx.x % n_lanes;
    if (expert >= n_experts) {
        return;
    }
    const float * x   = from.values + blockIdx.y * from.stride;
    const float * w   = router + (int64_t) expert * from.n_embd;
    float         sum = 0.0f;
    for (int i = lane; i < from.n_embd; i += n_lanes) {
        sum += w[i] * norm[i] * x[i];
    }
    sum = warp_reduce_sum(sum);
    if (lane == 0) {
        logits[blockIdx.y * n_experts + expert] = sum;
    }
}

// One block, a thread an expert.
__global__ void __launch_bounds__(slots::max_experts)
    guess_choice(const slots::layer of, const float * logits, int n_rows, int n_used) {
    __shared__ float of_row[slots::max_experts];
    __shared__ int   n_by_warp[n_lanes];
    __shared__ slots::room made;
    const int              e    = threadIdx.x;
    const bool             is   = e < of.n_experts;
    const slots::entry     mine = is ? of.state->entries[e] : slots::entry{ 0, 0, 0, -1, 0 };

    bool needed = false;
    for (int row = 0; row < n_rows; ++row) {
        __syncthreads(); // the last row's readers are done
        if (is) {
            of_row[e] = logits[row * of.n_experts + e];
        }
        __syncthreads();
        int n_above = 0;
        for (int other = 0; is && other < of.n_experts; ++other) {
            n_above += of_row[other] > of_row[e] || (of_row[other] == of_row[e] && other < e);
        }
        needed |= is && n_above < n_used;
    }
    slots::give_guesses(made, n_by_warp, of, mine, needed);
}

bool takes(const ggml_tensor * dst) {
    return dw::is_f32(dst->src[slots::hidden]) && dw::is_f32(dst->src[slots::norm]) &&
           dw::is_f32(dst->src[slots::router]) && ggml_is_contiguous(dst->src[slots::router]) &&
           dst->src[slots::hidden]->ne[1] <= slots::max_guess_rows;
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const slots::layer & of = *(const slots::layer *) with.layer;
    if (!of.copies) {
        return;
    }
    slots::copy_streams & copies = *of.copies;
    const ggml_tensor *   hidden = dst->src[slots::hidden];
    const rows from = { dw::data_of<float>(hidden), (int64_t) (hidden->nb[1] / sizeof(float)), (int) hidden->ne[0],
                        (int) hidden->ne[1] };
    const dim3 grid((of.n_experts + n_logit_warps - 1) / n_logit_warps, from.n);
    if (!copies.is_open) { // else what it reads was there before this layer's copies were queued
        CUDA_CHECK(cudaEventRecord(copies.is_hidden, with.stream));
        CUDA_CHECK(cudaStreamWaitEvent(copies.stream, copies.is_hidden, 0));
    }
    guess_logits<<<grid, n_logit_warps * n_lanes, 0, copies.stream>>>(from, dw::data_of<float>(dst->src[slots::norm]),
                                                                      dw::data_of<float>(dst->src[slots::router]),
                                                                      of.n_experts, copies.logits);
    guess_choice<<<1, slots::threads_for(of), 0, copies.stream>>>(of, copies.logits, from.n, slots::number_of(dst));
    slots::launch_fetch(of, copies.stream);
    CUDA_CHECK(cudaEventRecord(copies.is_fetched, copies.stream));
    copies.guessed      = &of;
    copies.is_made_here = true;
}

} // namespace

const dw::op_descriptor dw::expert_slots::guess_on_cuda = { dw::expert_slots::guess_signature, nullptr, takes, nullptr,
                                                            launch };
