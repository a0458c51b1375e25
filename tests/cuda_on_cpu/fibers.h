// The threads of a CUDA block as fibers of one CPU thread. They take turns: each runs until it has to wait for others of
// its warp or block. Blocks run one after another. Must not know: ggml, ops.

#pragma once

#include "cuda_runtime.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

// of the thread that has its turn
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {

constexpr size_t shared_bytes = 227 * 1024; // of a block, as on an H100
constexpr int    warp_size    = 32;

// Runs f() as each thread of each block. A thread may come to its end early, as on a card; barriers wait for the others.
// Dynamic shared memory begins as 0xFF bytes, which are NaN. Ends the process where threads wait for each other for
// ever.
void run(dim3 grid, dim3 block, size_t dynamic_bytes, const std::function<void()> & f);

[[noreturn]] void fail(const char * what); // says which thread of which kernel launch

void *   dynamic_memory(); // shared, of the block
int      lane();
uint32_t lanes_alive();  // of the warp, a bit each
void     meet_block();   // all threads of the block that are left come here
void     meet_warp();    // all lanes that are left
void *   exchange_slots(); // 32 of 64 bytes, of this exchange of the warp; each begins as whatever

// What each lane of the warp gave, [32]; valid until the lane's next exchange but one.
template <typename T> const T * of_lanes(const T & mine) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 64);
    T * slots = (T *) exchange_slots();
    std::memcpy((void *) (slots + lane()), &mine, sizeof(T));
    meet_warp();
    return slots;
}

} // namespace cuda_on_cpu

inline void __syncthreads() {
    cuda_on_cpu::meet_block();
}

inline void __syncwarp(uint32_t = 0xffffffff) {
    cuda_on_cpu::meet_warp();
}

int __syncthreads_count(int is_so);

// width: of the parts of a warp that exchange among themselves, a power of two
template <typename T> T __shfl_sync(uint32_t, T x, int from, int width = cuda_on_cpu::warp_size) {
    return cuda_on_cpu::of_lanes(x)[cuda_on_cpu::lane() / width * width + from % width];
}

template <typename T> T __shfl_xor_sync(uint32_t, T x, int mask, int width = cuda_on_cpu::warp_size) {
    const int lane = cuda_on_cpu::lane(), from = lane ^ mask;
    const T * all  = cuda_on_cpu::of_lanes(x);
    return from / width == lane / width ? all[from] : x;
}

inline uint32_t __ballot_sync(uint32_t, int is_so) {
    const int * all = cuda_on_cpu::of_lanes(is_so);
    uint32_t    out = 0;
    for (int i = 0; i < cuda_on_cpu::warp_size; ++i) {
        out |= (uint32_t) ((cuda_on_cpu::lanes_alive() >> i & 1) != 0 && all[i] != 0) << i;
    }
    return out;
}

inline uint32_t __reduce_max_sync(uint32_t, uint32_t x) {
    const uint32_t * all = cuda_on_cpu::of_lanes(x);
    for (int i = 0; i < cuda_on_cpu::warp_size; ++i) {
        x = cuda_on_cpu::lanes_alive() >> i & 1 && all[i] > x ? all[i] : x;
    }
    return x;
}
