// The queue in which a step's missing experts are copied on CUDA, while the layer goes on with what needs none of them.
// It forks from the queue of the step and joins it again before the layer's products, so a captured graph has it as a
// branch. Owner: the pool (experts/pool.h). Decodes of its contexts do not overlap.
// Test: tests/gpu/test_expert_pool_cuda.py.

#pragma once

#include "ops/expert-slots/expert-slots.h"

#include <cuda_runtime.h>

namespace dw::expert_slots {

struct beside {
    cudaStream_t stream    = nullptr;
    cudaEvent_t  is_chosen = nullptr; // what is to be copied
    cudaEvent_t  is_filled = nullptr;
    bool         is_open   = false; // copies were queued and not waited for yet

    // of guesses (guess.h), which follow this layer's copies in the same queue
    cudaEvent_t   is_hidden  = nullptr; // what they are made from
    cudaEvent_t   is_guessed = nullptr; // the next layer's table has them
    cudaEvent_t   is_fetched = nullptr;
    float *       logits     = nullptr; // f32[max_guess_rows, max_experts], on the device
    const layer * guessed    = nullptr; // whose experts were fetched ahead and are not waited for yet
};

} // namespace dw::expert_slots
