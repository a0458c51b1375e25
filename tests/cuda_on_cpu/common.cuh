// Stands in for ggml-cuda's common.cuh where our CUDA sources are compiled for a CPU: the words of CUDA C++ that they
// use, and what they ask of ggml-cuda. A kernel's threads are fibers that take turns (fibers.h), so a block behaves as on
// a card but for time: no two threads run together, and blocks run one after another. A missing barrier shows in one of
// two orders of turns, where values differ.
// Must not know: ops. Test: tests/ops/test_cuda_on_cpu.py.

#pragma once

#include "cuda_fp16.h"
#include "cuda_runtime.h"
#include "fibers.h"
#include "ggml.h"

#define GGML_COMMON_DECL_CUDA
#define GGML_COMMON_IMPL_CUDA
#include "ggml-common.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

#define __CUDA_ARCH__ 900
#define CUDA_CHECK(call) ((void) (call))
#define GGML_CUDA_CC_AMPERE 800
#define GGML_CUDA_MAX_DEVICES 1

using std::isinf;
using std::isnan;
using std::max;
using std::min;

// ---- values ----

template <typename to_type, typename from_type> to_type bits_as(from_type from) {
    static_assert(sizeof(to_type) == sizeof(from_type));
    to_type to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

inline uint32_t __float_as_uint(float x) { return bits_as<uint32_t>(x); }
inline int      __float_as_int(float x) { return bits_as<int>(x); }
inline float    __uint_as_float(uint32_t x) { return bits_as<float>(x); }
inline float    __int_as_float(int x) { return bits_as<float>(x); }
inline int      __float2int_rn(float x) { return (int) std::nearbyintf(x); }
inline float    rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float    __fmul_rn(float a, float b) {
    const volatile float product = a * b; // rounded by itself
    return product;
}
inline float    __fadd_rn(float a, float b) {
    const volatile float sum = a + b;
    return sum;
}
inline void     sincospif(float x, float * sine, float * cosine) {
    *sine   = (float) std::sin(x * 3.141592653589793);
    *cosine = (float) std::cos(x * 3.141592653589793);
}
inline int      __ffs(int x) { return __builtin_ffs(x); }
inline int      __ffsll(long long x) { return __builtin_ffsll(x); }
inline int      __popc(uint32_t x) { return __builtin_popcount(x); }
inline int      __popcll(uint64_t x) { return __builtin_popcountll(x); }

// bytes of y:x, the i-th named by digit i of `order`
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t order) {
    const uint64_t all = (uint64_t) y << 32 | x;
    uint32_t       out = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t digit = order >> (4 * i) & 15;
        const uint32_t byte  = (uint32_t) (all >> (8 * (digit & 7))) & 0xff;
        out |= (digit & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << (8 * i);
    }
    return out;
}

// c + the dot of four signed bytes
inline int ggml_cuda_dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; ++i) {
        c += (int8_t) (a >> (8 * i)) * (int8_t) (b >> (8 * i));
    }
    return c;
}

template <typename T> T __ldcv(const T * at) { return *at; }
template <typename T> T __ldcg(const T * at) { return *at; }

inline void __threadfence() {}
inline void __nanosleep(unsigned) {}
template <typename T> T atomicAdd(T * at, T x) { return std::exchange(*at, *at + x); }
template <typename T> T atomicMin(T * at, T x) { return std::exchange(*at, std::min(*at, x)); }
template <typename T> T atomicMax(T * at, T x) { return std::exchange(*at, std::max(*at, x)); }
template <typename T> T atomicOr(T * at, T x) { return std::exchange(*at, *at | x); }

// ---- ggml-cuda ----

inline float warp_reduce_sum(float x) {
    for (int offset = cuda_on_cpu::warp_size / 2; offset > 0; offset /= 2) {
        x += __shfl_xor_sync(0xffffffff, x, offset);
    }
    return x;
}

struct ggml_cuda_device_info {
    struct device {
        int    cc = 900, nsm = 4;
        size_t smpbo = cuda_on_cpu::shared_bytes;
    };
    int    device_count = 1;
    device devices[1];
};

// CUDA_ON_CPU_MULTIPROCESSORS in the environment: of the device, for launchers that look at them
inline const ggml_cuda_device_info & ggml_cuda_info() {
    static ggml_cuda_device_info one;
    const char *                 n = std::getenv("CUDA_ON_CPU_MULTIPROCESSORS");
    one.devices[0].nsm             = n ? std::atoi(n) : ggml_cuda_device_info::device().nsm;
    return one;
}
inline int  ggml_cuda_get_device() { return 0; }
inline void ggml_cuda_set_device(int) {}
inline int  ggml_cuda_highest_compiled_arch(int cc) { return cc; }

// kernels run one after another
inline void ggml_cuda_pdl_lc() {}
inline void ggml_cuda_pdl_sync() {}

struct ggml_cuda_kernel_launch_params {
    dim3         block_nums, block_dims;
    size_t       shmem;
    cudaStream_t stream;
};

namespace cuda_on_cpu { // launch.cpp
void count_launch(const void * kernel);
void queue(std::function<void()> launch); // in a stream beside the step's: as late as that may run
}

template <typename kernel_type, typename... argument_types>
void ggml_cuda_kernel_launch(kernel_type kernel, const ggml_cuda_kernel_launch_params & with,
                             argument_types... arguments) {
    cuda_on_cpu::count_launch((const void *) kernel);
    const auto launch = [=] {
        cuda_on_cpu::run(with.block_nums, with.block_dims, with.shmem, [&] { kernel(arguments...); });
    };
    if (with.stream) {
        cuda_on_cpu::queue(launch);
    } else {
        launch();
    }
}
