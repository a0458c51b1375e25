// Warps of a block that work together. A block of several teams has a multiprocessor to itself, where blocks of one
// team each would crowd some and leave others idle: a kernel starts while the one before it still has its places. Test:
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

// Asks for the lines of n_bytes in L2.
__device__ __forceinline__ void prefetch_by(const team & by, const void * at, int n_bytes) {
    for (int i = 128 * by.thread(); i < n_bytes; i += 128 * by.n_threads()) {
        ptx::prefetch_l2((const char *) at + i);
    }
}

} // namespace dw::layer_parts
