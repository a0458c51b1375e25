// Warps of a block that work together. A kernel starts while the one before it holds threads and shared memory, so
// small blocks would crowd some multiprocessors and leave others idle: blocks of several teams have one each. Test:
// tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "common.cuh"
#include "ops/door/ptx.cuh"

namespace dw::layer_parts {

constexpr int most_teams = 15; // of a block: each has a barrier, and 0 is the block's

struct team {
    int number, warp, n_warps; // of the block; this thread's; of the team

    static __device__ __forceinline__ team of_warps(int n_warps) {
        return { (int) threadIdx.x / 32 / n_warps, (int) threadIdx.x / 32 % n_warps, n_warps };
    }
    static __device__ __forceinline__ team of_block() { return { 0, (int) threadIdx.x / 32, (int) blockDim.x / 32 }; }

    __device__ __forceinline__ int n_threads() const { return 32 * n_warps; }
    __device__ __forceinline__ int thread() const { return 32 * warp + threadIdx.x % 32; }
    // All threads of the team.
    __device__ __forceinline__ void meet() const { ptx::meet(1 + number, n_threads()); }
};

} // namespace dw::layer_parts
