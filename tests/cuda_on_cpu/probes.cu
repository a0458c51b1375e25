// Kernels for tests/ops/test_cuda_on_cpu.py, which looks at cuda_on_cpu itself.

#include "common.cuh"
#include "ops/door/ptx.cuh"

namespace {

constexpr int n_threads = 128;

enum class barrier { none, warp, block };

// to[i] = from[i + by] by way of shared memory, 0 behind the ends. Needs a barrier: of the block, or, if values stay
// in their warps, of the warp.
__global__ void shift(const int * from, int * to, int by, barrier which) {
    __shared__ int all[n_threads];
    const int      i = threadIdx.x, at = i + by;
    all[i] = from[i];
    if (which == barrier::warp) {
        __syncwarp();
    } else if (which == barrier::block) {
        __syncthreads();
    }
    to[i] = at >= 0 && at < n_threads ? all[at] : 0;
}

// to = from by way of shared memory
__global__ void fetch(const int4 * from, int4 * to, bool waits) {
    __shared__ int4 all[n_threads];
    dw::ptx::copy_16</*once*/ true>(dw::ptx::address_of(&all[threadIdx.x]), from + threadIdx.x);
    dw::ptx::end_of_copies();
    if (waits) {
        dw::ptx::wait_for_copies<0>();
    }
    to[threadIdx.x] = all[threadIdx.x];
}

} // namespace

// from, to: int[128]
extern "C" void cuda_on_cpu_shift(const int * from, int * to, int by, int which) {
    shift<<<1, n_threads, 0, nullptr>>>(from, to, by, (barrier) which);
}

// from, to: int4[128]
extern "C" void cuda_on_cpu_fetch(const int4 * from, int4 * to, bool waits) {
    fetch<<<1, n_threads, 0, nullptr>>>(from, to, waits);
}
