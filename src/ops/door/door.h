// What the patched lines of ggml-cuda call: our ops enter a graph as GGML_OP_CUSTOM and leave through here. Compiled
// inside the ggml-cuda target; knows nothing of single ops. Test: tests/gpu.

#pragma once

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

// ggml_backend_cuda_reg_get_proc_address, first: a launcher of ours by name (custom-op.h), "dw_cuda_admit" or
// "dw_cuda_launches"; NULL: none of ours
void * dw_cuda_find(const char * name);

// ggml_backend_cuda_device_supports_op: the node carries an admitted descriptor that has a launcher
bool dw_cuda_supports(const struct ggml_tensor * node);

// ggml_cuda_compute_forward: launch it in this stream (a cudaStream_t)
bool dw_cuda_compute(struct ggml_tensor * node, void * stream);

// ggml_backend_cuda_graph_compute, before the launch: whether a CUDA graph is launched, and whether it was captured or
// updated for that
void dw_cuda_count(bool use_graph, bool new_graph);

// "dw_cuda_launches": ggml graphs computed since the process started; those that replayed a CUDA graph as it was
struct dw_cuda_launches {
    int64_t all;
    int64_t replayed;
};
typedef struct dw_cuda_launches (*dw_cuda_launches_t)(void);

#ifdef __cplusplus
}
#endif
