// The queue in which experts are fetched ahead on CUDA (guess.h). Where a layer is llama.cpp's nodes, its own are found
// and copied there, too, while the step goes on with what needs none of them; where it is ops of layer-parts.h, they
// are found in the queue of the step and copied here, and its products wait for each expert (arrivals.cuh). A pool
// without guesses has none: a second queue costs each launch of a step. It forks from the queue of the step and joins
// it again before the products of a layer that do not wait themselves, the last one's at the latest, so a captured
// graph has it as a branch. Owner: the pool (experts/pool.h). Decodes of its contexts do not overlap. Test:
// tests/gpu/test_expert_pool_cuda.py.

#pragma once

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
};

} // namespace dw::expert_slots
