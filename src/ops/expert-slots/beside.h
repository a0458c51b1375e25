// The queue in which experts are fetched ahead on CUDA (guess.h), and a layer's are found and copied while the step
// goes on with what needs none of them. A pool without guesses has none: a second queue costs each launch of a step. It
// forks from the queue of the step and joins it again before the layer's products, so a captured graph has it as a
// branch. Owner: the pool (experts/pool.h). Decodes of its contexts do not overlap.
// Test: tests/gpu/test_expert_pool_cuda.py.

#pragma once

#include "ops/expert-slots/expert-slots.h"

#include <cuda_runtime.h>

namespace dw::expert_slots {

struct beside {
    cudaStream_t stream    = nullptr;
    cudaEvent_t  is_chosen = nullptr; // by the router
    cudaEvent_t  is_filled = nullptr;
    bool         is_open   = false; // a layer's slots were asked for here and not waited for yet

    // of guesses (guess.h), which follow this layer's copies in the same queue
    cudaEvent_t   is_hidden  = nullptr; // what they are made from
    cudaEvent_t   is_fetched = nullptr;
    float *       logits     = nullptr; // f32[max_guess_rows, max_experts], on the device
    const layer * guessed    = nullptr; // whose experts were fetched ahead and are not waited for yet
};

} // namespace dw::expert_slots
