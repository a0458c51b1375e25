// Graphs that GPUs computed in this process, and how many of them replayed a captured CUDA graph as it was.
// Test: tests/gpu/test_expert_pool_cuda.py.

#pragma once

#include <cstdint>

namespace draftwood {

struct launches {
    int64_t all      = 0;
    int64_t replayed = 0;
};

// zeros where no backend counts (src/ops/door/door.h)
launches gpu_launches();

} // namespace draftwood
