// What kernels share that start while the one before them ends: multiprocessors, and their shared memory. Must not
// know: ops. Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "common.cuh"

#include <utility>

namespace dw {

// Bounds of kernels of one row, two of which share a multiprocessor while one ends: 80 registers a thread. Each quarter
// of a multiprocessor has 512 for its lanes, so up to three warps of each kernel: blocks of twelve warps at most start
// early. What does not fit starts when the other one has ended, and all that follow wait for it.
constexpr int bounds_of_neighbours = 768;

inline int n_multiprocessors() {
    return ggml_cuda_info().devices[ggml_cuda_get_device()].nsm;
}

// Dynamic shared memory that a block may have. A kernel has few variables in shared memory beside it.
inline size_t shared_memory_of_block() {
    constexpr size_t of_variables = 1024;
    return ggml_cuda_info().devices[ggml_cuda_get_device()].smpbo - of_variables;
}

// Dynamic shared memory of a block of which a multiprocessor runs at most n. Compute capability 7.0 and later, where
// one block may have nearly all of it. 0, no bound, for more than 7 blocks: the sum could exclude the n-th one.
inline size_t shared_memory_for(int n) {
    return n <= 7 ? shared_memory_of_block() / (n + 1) + 1024 : 0;
}

// Sets what a kernel asks for, once per device. has_dynamic: its blocks have dynamic shared memory. keeps_shared: it
// asks for a multiprocessor's most shared memory, little of it cache, however little it takes itself. A multiprocessor
// changes this split only when it is empty, and with the split that one kernel needs there may be no room for the next
// one. Static: these are attributes of a file's kernels.
template <auto kernel, bool keeps_shared, bool has_dynamic> static void set_attributes() {
    static bool is_set[GGML_CUDA_MAX_DEVICES] = {};
    const int   device                        = ggml_cuda_get_device();
    if (is_set[device]) {
        return;
    }
    const void * function = (const void *) kernel;
    if (keeps_shared) {
        CUDA_CHECK(cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout, 100));
    }
    if (has_dynamic) { // all that its variables leave
        cudaFuncAttributes of;
        CUDA_CHECK(cudaFuncGetAttributes(&of, function));
        CUDA_CHECK(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        (int) (ggml_cuda_info().devices[device].smpbo - of.sharedSizeBytes)));
    }
    is_set[device] = true; // another thread that comes here meanwhile does the same
}

template <auto kernel, bool keeps_shared = false, typename... argument_types>
static void launch_kernel(const ggml_cuda_kernel_launch_params & with, argument_types &&... arguments) {
    if (with.shmem > 0) {
        set_attributes<kernel, keeps_shared, /*has_dynamic*/ true>();
    } else {
        set_attributes<kernel, keeps_shared, /*has_dynamic*/ false>();
    }
    ggml_cuda_kernel_launch(kernel, with, std::forward<argument_types>(arguments)...);
}

} // namespace dw
