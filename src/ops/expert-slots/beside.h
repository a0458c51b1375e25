// The queue in which experts are fetched ahead on CUDA (guess.h). Where a layer is llama.cpp's nodes, its own are found
// and copied there, too, while the step goes on with what needs none of them; where it is ops of layer-parts.h, they
// are copied here, and its products wait for each expert (arrivals.cuh). Slots are then found in a third queue while
// gate and up run, or, where these cannot look for themselves, in the queue of the step. A pool without guesses has no
// such queue: it costs each launch of a step. Queues fork from that of the step. The third one joins it behind down;
// the second one before the products of a layer that do not wait themselves, the last one's at the latest. So a
// captured graph has them as branches. Owner: the pool (experts/pool.h). Decodes of its contexts do not overlap. Test:
// tests/gpu/test_expert_pool_cuda.py.

#pragma once

#include "common.cuh"
#include "ops/expert-slots/expert-slots.h"

#include <cuda_runtime.h>

namespace dw::expert_slots {

struct beside {
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
inline void join_found(beside & copies, cudaStream_t stream) {
    if (copies.found) {
        CUDA_CHECK(cudaStreamWaitEvent(stream, copies.is_found, 0));
        copies.found = nullptr;
    }
}

} // namespace dw::expert_slots
