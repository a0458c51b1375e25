// What the patched lines of ggml-cuda call: our ops enter a graph as GGML_OP_CUSTOM and leave through here. Compiled
// inside the ggml-cuda target. Test: tests/gpu.

#pragma once

#include "ggml.h"

#include <cstdint>

struct ggml_backend_cuda_context;
// cudaGraphExec_t, cudaGraph_t and cudaStream_t point to these
struct CUgraphExec_st;
struct CUgraph_st;
struct CUstream_st;

// ggml_backend_cuda_reg_get_proc_address, first: a `const dw::op_descriptor *` by the op's name, or
// "dw_cuda_launches", "dw_copies" (ops/copies/copies.h), "dw_slot_memory" (ops/expert-slots/slot-memory.h); NULL: none
// of ours
void * dw_cuda_find(const char * name);

// ggml_backend_cuda_device_supports_op: the node is ours, has all its operands, and its op takes it
bool dw_cuda_supports(const ggml_tensor * node);

// The same for ggml's own delta net: ggml-cuda has kernels for some sizes of a head's state, and ends the process in
// others.
bool dw_cuda_has_delta_net(const ggml_tensor * node);

// ggml_cuda_compute_forward: launch the node in the context's stream; false: it is not ours
bool dw_cuda_compute(ggml_backend_cuda_context & ctx, ggml_tensor * node);

// ggml_backend_cuda_graph_compute, before the launch: whether a CUDA graph is launched, and whether it was captured or
// updated for that
void dw_cuda_count(bool use_graph, bool new_graph);

// ggml_backend_cuda_graph_compute: make `instance` of a captured graph, with the memory that launches on `stream` take.
// If the card has none left, it stays nullptr and the log says so; from then on the graph's kernels are launched one by
// one. An update of a graph that finds no memory still ends the process.
void dw_cuda_instantiate(CUgraphExec_st *& instance, CUgraph_st * graph, CUstream_st * stream);

// "dw_cuda_launches": ggml graphs computed since the process started; those that replayed a CUDA graph as it was
struct dw_cuda_launches {
    int64_t all;
    int64_t replayed;
};
using dw_cuda_launches_t = dw_cuda_launches (*)();
