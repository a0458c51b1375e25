// What a CUDA launcher is given, and how it reads tensors. All that varies from round to round is read from device
// tensors inside the kernels. Must not know: ggml-cuda. Test: tests/gpu/test_tree_ops_cuda.py.

#pragma once

#include "ggml.h"
#include "ops/door/custom-op.h"

#include <cstdint>
#include <cuda_runtime.h>

namespace dw {

struct launch_context {
    int          device; // ggml-cuda's number of it; it is the current one
    cudaStream_t stream;

    // Device memory of as many bytes as op_descriptor::workspace gave; NULL for 0. Aligned to 128 bytes. It comes from
    // ggml-cuda's pool of this stream and goes back when the launcher returns: kernels that were queued in the stream
    // may use it, a later node overwrites it. A captured graph keeps the address. The pool's memory stays mapped as
    // long as the context, as for ggml-cuda's own ops. As for these, a pool that cannot grow ends the process.
    void * workspace;
    size_t workspace_bytes;

    const void * layer; // layer_of(dst); NULL: none
};

template <typename T> T * data_of(const ggml_tensor * t) {
    return (T *) t->data;
}

// a stride in f32 values
inline int64_t stride_of(const ggml_tensor * t, int dim) {
    return (int64_t) (t->nb[dim] / sizeof(float));
}

inline bool is_f32(const ggml_tensor * t) {
    return t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float);
}

inline bool is_i32(const ggml_tensor * t) {
    return t->type == GGML_TYPE_I32 && ggml_is_contiguous(t);
}

inline unsigned n_blocks(int64_t n, int64_t of_a_block) {
    return (unsigned) ((n + of_a_block - 1) / of_a_block);
}

} // namespace dw
