// Two CUDA streams beside the step's own, for a pool that guesses (guess.h):
// - `stream` fetches experts ahead. For a layer of llama.cpp's nodes it also finds and copies the layer's own experts,
//   while the step computes what needs none of them. For a layer of layer-parts ops it only copies, and products wait
//   for each expert (arrivals.cuh).
// - `finding` looks up slots while gate and up run, if these can look for themselves. Else the step's stream does it.
// Both fork from the step's stream, so a captured graph has them as branches. `finding` joins it after down. `stream`
// joins it before the first products that do not wait, at the latest before those of the last layer. A pool without
// guesses has neither, since they cost each launch of a step. Owner: the pool (experts/pool.h). Decodes of its contexts
// do not overlap. Test: tests/gpu/test_expert_pool_cuda.py.

#pragma once

#include "common.cuh"
#include "ops/expert-slots/expert-slots.h"

#include <cuda_runtime.h>

namespace dw::expert_slots {

struct copy_streams {
    cudaStream_t stream    = nullptr;
    cudaEvent_t  is_chosen = nullptr; // by the router
    cudaEvent_t  is_filled = nullptr;
    bool         is_open   = false; // a layer's slots were asked for here and not waited for yet

    // of guesses
    cudaEvent_t   is_hidden    = nullptr; // what dw_expert_guess makes them from
    cudaEvent_t   is_fetched   = nullptr;
    float *       logits       = nullptr; // f32[max_guess_rows, max_experts], on the device
    const layer * guessed      = nullptr; // whose experts were fetched ahead and are not waited for yet
    bool          is_made_here = false;   // they were made in this queue: until it has ended their table may change

    cudaStream_t  finding  = nullptr; // finds slots beside gate and up
    cudaEvent_t   is_found = nullptr;
    const layer * found    = nullptr; // whose slots are found there and are not waited for yet
    bool          was_used = false;   // by the layer before
};

// What comes next in the queue of the step waits for what was found beside gate and up.
inline void join_found(copy_streams & copies, cudaStream_t stream) {
    if (copies.found) {
        CUDA_CHECK(cudaStreamWaitEvent(stream, copies.is_found, 0));
        copies.found = nullptr;
    }
}

} // namespace dw::expert_slots
