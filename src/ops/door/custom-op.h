// What a GGML_OP_CUSTOM node of ours carries in `userdata`, so that a device that knows it can run the node: there it
// is found by its address, among those that were admitted (src/ops/door/door.h), and never read before. The node's
// `fun` is `cpu`, the reference. Descriptors live as long as the process.

#pragma once

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

// Queue the node in a cudaStream_t. No allocation, no waiting, and a launch that depends on shapes only: it may be
// captured into a CUDA graph and replayed with other data.
typedef void (*dw_cuda_launch_t)(struct ggml_tensor * dst, void * stream);

struct dw_custom_op {
    ggml_custom_op_t cpu;
    dw_cuda_launch_t cuda; // NULL: on the CPU only
};

// "dw_cuda_admit" of a CUDA backend's registry: the descriptor's nodes may run there. Again and again without effect,
// from any thread.
typedef void (*dw_cuda_admit_t)(const struct dw_custom_op * op);

#ifdef __cplusplus
}
#endif
