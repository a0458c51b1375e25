// Where a prompt's experts wait for their products on CUDA. There are two places, each large enough for all experts of
// one layer; a layer's experts are copied into one on a stream of their own while the layer before it computes out of
// the other. Each part's range of addresses (expert-slots.h) ends with the place that its layer uses, so an index says
// where to read. Owner: the pool (experts/pool.h). Decodes of its contexts do not overlap.
// Test: tests/gpu/test_expert_pool_cuda.py.

#pragma once

#include "ops/expert-slots/expert-slots.h"

#include <cuda_runtime.h>

namespace dw::expert_slots {

struct stage {
    cudaStream_t  stream      = nullptr; // of the copies
    cudaEvent_t   is_free     = nullptr; // the place to copy into
    cudaEvent_t   is_ready[2] = {};      // by place
    const layer * coming      = nullptr; // whose copies were queued last and are not waited for yet
    bool          is_captured = false;   // they were, into a graph
};

} // namespace dw::expert_slots
