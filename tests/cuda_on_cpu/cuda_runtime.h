// Stands in for CUDA's header of this name: the language, vectors and the few calls that launchers make. Kernels and
// copies are done when the call returns, but for kernels in a stream with a name: those are done when the step's stream,
// which has none, waits for an event. Must not know: ggml.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <math.h>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n)    alignas(n)
#define __shared__      static // a block runs alone
#define __constant__    static const

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3(unsigned nx = 1, unsigned ny = 1, unsigned nz = 1) : x(nx), y(ny), z(nz) {}
};

template <typename T> struct alignas(2 * sizeof(T)) vector_of_2 { T x, y; };
template <typename T> struct alignas(4 * sizeof(T)) vector_of_4 { T x, y, z, w; };
using float2 = vector_of_2<float>;
using int2   = vector_of_2<int>;
using uint2  = vector_of_2<unsigned>;
using ulonglong2 = vector_of_2<unsigned long long>;
using float4 = vector_of_4<float>;
using int4   = vector_of_4<int>;
using uint4  = vector_of_4<unsigned>;

inline float2 make_float2(float x, float y) { return { x, y }; }
inline int2   make_int2(int x, int y) { return { x, y }; }
inline uint2  make_uint2(unsigned x, unsigned y) { return { x, y }; }
inline float4 make_float4(float x, float y, float z, float w) { return { x, y, z, w }; }
inline int4   make_int4(int x, int y, int z, int w) { return { x, y, z, w }; }
inline uint4  make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return { x, y, z, w }; }

using cudaStream_t = void *;
using cudaEvent_t  = void *;
enum cudaError_t { cudaSuccess };
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize,
    cudaFuncAttributePreferredSharedMemoryCarveout,
};

template <typename kernel_type> cudaError_t cudaFuncSetAttribute(kernel_type, cudaFuncAttribute, int) {
    return cudaSuccess;
}
struct cudaFuncAttributes {
    size_t sharedSizeBytes;
};

// what a kernel has in shared memory beside its dynamic part is not known here
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes * of, const void *) {
    *of = {};
    return cudaSuccess;
}

// as many blocks as an H100's multiprocessor might hold; launchers only divide work by it
template <typename kernel_type>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int * n, kernel_type, int, size_t) {
    *n = 2;
    return cudaSuccess;
}

inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) {
    return cudaSuccess;
}
namespace cuda_on_cpu {
void run_queued(); // launch.cpp
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t, unsigned) {
    if (!stream) {
        cuda_on_cpu::run_queued();
    }
    return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) {
    return cudaSuccess;
}

enum cudaMemcpyKind { cudaMemcpyDefault };
inline cudaError_t cudaMemcpyAsync(void * to, const void * from, size_t n_bytes, cudaMemcpyKind, cudaStream_t) {
    std::memcpy(to, from, n_bytes);
    return cudaSuccess;
}

enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone };
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus * status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
