// Descriptors of our ops: what a GGML_OP_CUSTOM node of ours carries in `userdata`.
//
// A backend has one static descriptor an op, in the op's folder: `on_cpu` in ggml-cpu, `on_cuda` in ggml-cuda. Both
// begin with the op's signature, which the op's header defines. A descriptor lives as long as the process. A backend
// knows its own descriptors by address: it reads `userdata` only after it has found that address in its table, so it
// never reads the userdata of another program's custom node. There is nothing to admit and nothing to run out of.
// Test: tests/ops/test_door.py, tests/gpu/test_tree_ops_cuda.py.

#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace dw {

struct launch_context; // door/launch.h

// The part of a descriptor that is equal on every backend.
struct op_signature {
    const char *         name;     // "dw_...": the registry's key, and the start of a node's name
    const char * const * operands; // names of dst->src[0], dst->src[1], ...; of an op in place, src[0] is dst itself
    int                  n_operands;
    int                  n_optional = 0; // so many of the last operands may be missing
};

struct op_descriptor {
    op_signature     signature;
    ggml_custom_op_t cpu; // the reference; set in ggml-cpu's table only

    // Set in ggml-cuda's table only. `takes` says whether the launcher can run a node whose operands are all there.
    // `workspace` gives the bytes of device memory that a launch needs; NULL: none. `launch` queues the node. It does
    // not allocate and does not wait, and its launches depend on shapes, addresses and the layer pointer only:
    // ggml-cuda captures them into a CUDA graph and replays them with other data.
    bool (*takes)(const ggml_tensor * dst);
    size_t (*workspace)(const ggml_tensor * dst);
    void (*launch)(const launch_context & with, ggml_tensor * dst);
};

// The layer pointer of a node: what a launcher needs beside the operands, for example the weights of a fused layer.
// It lies in op_params behind ggml's own ggml_custom_op_params, so it differs from node to node of one op. Whoever
// builds the node owns what it points to, and keeps it as long as the graph.
constexpr size_t layer_at = 24; // bytes

inline const void * layer_of(const ggml_tensor * node) {
    const void * layer;
    std::memcpy(&layer, (const char *) node->op_params + layer_at, sizeof(layer));
    return layer;
}

} // namespace dw

// An op as the nodes for one device carry it. Made by draftwood::find_op (door/registry.h).
struct dw_custom_op {
    const dw::op_descriptor * reference; // ggml-cpu's
    const dw::op_descriptor * of_device; // the device's, which goes into `userdata`; on a CPU the reference

    const char * name() const { return reference->signature.name; }
};
