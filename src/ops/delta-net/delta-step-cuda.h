// One element of S <- e^g S + k u^T, rounded as in ggml-cuda's GATED_DELTA_NET. Which of the two products is fused into
// the sum is its compiler's choice: another one where a lane has a single element of a column. Test:
// tests/gpu/test_tree_ops_cuda.py (bits), which tells when a compiler chooses otherwise.

#pragma once

#include <cuda_runtime.h>

namespace dw {

constexpr int small_head = 32; // lanes of a warp

template <bool is_small> __device__ inline float delta_step(float state, float decay, float k, float u) {
    return is_small ? fmaf(k, u, decay * state) : fmaf(decay, state, k * u);
}

} // namespace dw
