// Instructions that CUDA C++ has no words for. Products need compute capability 8.0, copies of spans 9.0; callers are
// not launched on less. Must not know: ops. tests/cuda_on_cpu has a file of this name that does the same on
// a CPU. Test: tests/ops/test_cuda_layers.py, tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "common.cuh"

namespace dw::ptx {

// Asks for the line of L2 that holds an address.
__device__ __forceinline__ void prefetch_l2(const void * at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// (x & mask) ^ bits, in one instruction: the compiler makes two of it where more follows.
__device__ __forceinline__ uint32_t and_xor(uint32_t x, uint32_t mask, uint32_t bits) {
    uint32_t y;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
    return y;
}

// Of each byte its highest bit, eight times.
__device__ __forceinline__ uint32_t highest_bits(uint32_t x) {
    uint32_t y;
    asm("prmt.b32 %0, %1, 0, 0xba98;" : "=r"(y) : "r"(x));
    return y;
}

// An address in shared memory. Made of a pointer once for many copies: the compiler makes it again for each.
using shared_address = uint32_t;

__device__ __forceinline__ shared_address address_of(void * shared) {
    return (uint32_t) __cvta_generic_to_shared(shared);
}

// Copies 16 bytes into shared memory, without waiting; both addresses are multiples of 16. Before compute capability
// 8.0 it waits. once: what was read this way is the first to leave L2.
template <bool once> __device__ __forceinline__ void copy_16(shared_address to, const void * from) {
#if __CUDA_ARCH__ >= 800
    if constexpr (once) {
        uint64_t read_once;
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(read_once));
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                     "l"(read_once)
                     : "memory");
    } else {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    }
#else
    *(int4 *) __cvta_shared_to_generic(to) = *(const int4 *) from;
#endif
}

// Ends a group: the copies of this thread since the last one.
__device__ __forceinline__ void end_of_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all groups of this thread but the newest n_open.
template <int n_open> __device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(n_open) : "memory");
#endif
}

// Counts what arrives in shared memory, in turns of so many copies. Compute capability 9.0, as all with spans.
using arrivals = uint64_t;

// One thread. Others, and copies of other threads, see it behind the block's next barrier.
__device__ __forceinline__ void begin_arrivals(arrivals * at, int n_copies = 1) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address_of(at)), "r"(n_copies) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
    NO_DEVICE_CODE;
#endif
}

// One thread: a copy of the next turn, of n_bytes into shared memory, without waiting. These and both addresses are
// multiples of 16. once: what was read this way is the first to leave L2.
template <bool once>
__device__ __forceinline__ void copy_span(void * to, const void * from, int n_bytes, arrivals * at) {
#if __CUDA_ARCH__ >= 900
    const uint32_t place = address_of(at);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(place), "r"(n_bytes) : "memory");
    if constexpr (once) {
        uint64_t read_once;
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(read_once));
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
                     "[%3], %4;" ::"r"(address_of(to)),
                     "l"(from), "r"(n_bytes), "r"(place), "l"(read_once)
                     : "memory");
    } else {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         address_of(to)),
                     "l"(from), "r"(n_bytes), "r"(place)
                     : "memory");
    }
#else
    NO_DEVICE_CODE;
#endif
}

// Waits for a turn's copies. The turn before it must have come: turns are told apart by their numbers modulo 2.
__device__ __forceinline__ void wait_for_span(arrivals * at, int turn) {
#if __CUDA_ARCH__ >= 900
    uint32_t has_come;
    do {
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.b32 %0, 1, 0, p;\n}"
                     : "=r"(has_come)
                     : "r"(address_of(at)), "r"(turn % 2)
                     : "memory");
    } while (!has_come);
#else
    NO_DEVICE_CODE;
#endif
}

// Waits until n_threads of the block, whole warps, have come to barrier `number`, 1 to 15: 0 is __syncthreads'.
__device__ __forceinline__ void meet(int number, int n_threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(number), "r"(n_threads) : "memory");
}

// Copies of spans that follow read what this thread has seen written, behind a fence.
__device__ __forceinline__ void let_spans_see() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t x;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(x));
    return x;
}

// d += a b, by a warp: a 16 x 32 values of 8 bits, signed or not, b 32 x 8 signed, d 16 x 8. Fragments as in the PTX
// manual, mma.m16n8k32.
template <bool is_signed>
__device__ __forceinline__ void multiply_8_bits(int (&d)[4], const uint32_t (&a)[4], uint2 b) {
#if __CUDA_ARCH__ >= 800
    if constexpr (is_signed) {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
    } else {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
    }
#else
    NO_DEVICE_CODE;
#endif
}

// The same of 16 values, all signed: mma.m16n8k16.
__device__ __forceinline__ void multiply_8_bits(int (&d)[4], uint2 a, uint32_t b) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a.x), "r"(a.y), "r"(b));
#else
    NO_DEVICE_CODE;
#endif
}

// d += a b, by a warp: a 16 x 16 values of F16, b 16 x 8, d 16 x 8 of f32: mma.m16n8k16.
__device__ __forceinline__ void multiply_16_bits(float (&d)[4], const uint32_t (&a)[4], uint2 b) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
#else
    NO_DEVICE_CODE;
#endif
}

// Host: every device is at least of this compute capability, and was compiled for one.
inline bool all_devices_have(int capability) {
    const auto & info = ggml_cuda_info();
    for (int i = 0; i < info.device_count; ++i) {
        if (ggml_cuda_highest_compiled_arch(info.devices[i].cc) < capability) {
            return false;
        }
    }
    return true;
}

inline bool has_products() {
    return all_devices_have(GGML_CUDA_CC_AMPERE);
}

inline bool has_spans() {
    return all_devices_have(GGML_CUDA_CC_HOPPER);
}

} // namespace dw::ptx
