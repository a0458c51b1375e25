// The threads of a CUDA block as fibers of one CPU thread. They take turns: each runs until it has to wait for others
// of its warp or block. Blocks run one after another. Must not know: ggml, ops.

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

// Runs f() as each thread of each block. A thread may come to its end early, as on a card; barriers wait for the
// others. Shared memory begins as 0xFF bytes, which are NaN. Ends the process where threads wait for each other for
// ever.
//
// The environment variable CUDA_ON_CPU_ORDER says in which order warps take turns between two barriers of the block,
// and lanes between two of the warp: "forward", the default, "reverse", or a number: one of the two each time, by
// chance, with the number as seed. If one thread reads what another one writes and no barrier stands between, forward
// and reverse give it the old value in one and the new one in the other. In reverse, asynchronous copies are made as
// late as they may be, otherwise at once.
void run(dim3 grid, dim3 block, size_t dynamic_bytes, const std::function<void()> & f);

[[noreturn]] void fail(const char * what); // says which thread of which kernel launch

void *   dynamic_memory();                  // shared, of the block
void     poison(void * at, size_t n_bytes); // a shared variable, when the first thread of the block declares it
int      lane();
uint32_t lanes_alive();    // of the warp, a bit each
void     meet_block();     // all threads of the block that are left come here
void     meet(int number, int n_threads); // so many threads of it come to this barrier, 1 to 15
void     meet_warp();      // all lanes that are left
void *   exchange_slots(); // 32 of 64 bytes, of this exchange of the warp; each begins as whatever

// Asynchronous copies of this thread, in groups: ops/door/ptx.cuh.
void copy(void * to, const void * from, size_t n_bytes);
void end_of_copies();
void wait_for_copies(int n_open);

// Copies that are counted where they arrive: ops/door/ptx.cuh.
struct arrivals {
    int n_copies, n_come; // of a turn; of this one
    int n_turns;          // that have come
};

void copy(void * to, const void * from, size_t n_bytes, arrivals * at);
void wait_for_turn(const arrivals * at, int turn); // as a card's: of turns that have come the last one alone

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
    const T * all = cuda_on_cpu::of_lanes(x);
    return from / width == lane / width ? all[from] : x;
}

inline uint32_t __ballot_sync(uint32_t, int is_so) {
    const int *    all   = cuda_on_cpu::of_lanes(is_so);
    const uint32_t alive = cuda_on_cpu::lanes_alive();
    uint32_t       out   = 0;
    for (int i = 0; i < cuda_on_cpu::warp_size; ++i) {
        out |= (uint32_t) ((alive >> i & 1) != 0 && all[i] != 0) << i;
    }
    return out;
}

inline uint32_t __reduce_max_sync(uint32_t, uint32_t x) {
    const uint32_t * all   = cuda_on_cpu::of_lanes(x);
    const uint32_t   alive = cuda_on_cpu::lanes_alive();
    for (int i = 0; i < cuda_on_cpu::warp_size; ++i) {
        x = alive >> i & 1 && all[i] > x ? all[i] : x;
    }
    return x;
}
