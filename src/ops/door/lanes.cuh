// Reductions over the lanes of a warp that several ops have; each lane gets the result. Must not know: ops.
// Test: tests/gpu/test_layer_parts_cuda.py, tests/gpu/test_tree_ops_cuda.py.

#pragma once

#include "common.cuh"

#include <cstdint>

namespace dw {

__device__ __forceinline__ uint32_t max_of_lanes(uint32_t x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(0xffffffff, x);
#else
    for (int offset = 16; offset > 0; offset /= 2) {
        x = max(x, __shfl_xor_sync(0xffffffff, x, offset));
    }
    return x;
#endif
}

} // namespace dw
