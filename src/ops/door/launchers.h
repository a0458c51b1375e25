// The CUDA launchers of our ops, by the names and arguments of tree-ops.h, tree-attention.h and top-rows.h, and which
// nodes they take. All that varies from round to round is read from device tensors inside the kernels.
// Must not know: ggml-cuda, descriptors. Test: tests/gpu/test_tree_ops_cuda.py.

#pragma once

#include "ggml.h"

#include <cstdint>
#include <cuda_runtime.h>

namespace dw {

constexpr int max_tree_nodes = 64; // of one sequence

void launch_tree_conv_windows(ggml_tensor * dst, void * stream);
void launch_tree_delta_net(ggml_tensor * dst, void * stream);
void launch_tree_commit_state(ggml_tensor * dst, void * stream);
void launch_tree_commit_conv(ggml_tensor * dst, void * stream);
void launch_tree_commit_rows(ggml_tensor * dst, void * stream);
void launch_tree_commit_columns(ggml_tensor * dst, void * stream);
void launch_top_rows(ggml_tensor * dst, void * stream);

bool takes_tree_conv_windows(const ggml_tensor * dst);
bool takes_tree_delta_net(const ggml_tensor * dst); // heads of 16, 32, 64 or 128, as ggml-cuda's own op
bool takes_tree_commit_state(const ggml_tensor * dst);
bool takes_tree_commit_conv(const ggml_tensor * dst);
bool takes_tree_commit_rows(const ggml_tensor * dst);
bool takes_tree_commit_columns(const ggml_tensor * dst);
bool takes_top_rows(const ggml_tensor * dst);

template <typename T> T * data_of(const ggml_tensor * t) {
    return (T *) t->data;
}

// a stride in f32 values
inline int64_t stride_of(const ggml_tensor * t, int dim) {
    return (int64_t) (t->nb[dim] / sizeof(float));
}

inline bool is_f32(const ggml_tensor * t) {
    return t && t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float);
}

inline bool is_i32(const ggml_tensor * t) {
    return t && t->type == GGML_TYPE_I32 && ggml_is_contiguous(t);
}

inline unsigned n_blocks(int64_t n, int64_t of_a_block) {
    return (unsigned) ((n + of_a_block - 1) / of_a_block);
}

} // namespace dw
