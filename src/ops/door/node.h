// Builds nodes of our ops: operands by name, one place for ggml's custom nodes.
// Errors: aborts where an operand is missing, given twice or unknown to the op, which a first run shows.
// Test: tests/ops/test_door.py.

#pragma once

#include "ggml.h"
#include "ops/door/custom-op.h"

#include <array>
#include <initializer_list>

namespace dw {

struct operand {
    int           index;  // of the op's `src` enum
    ggml_tensor * tensor; // nullptr: an optional one that the node lacks
};

// the node's sources in the op's order
inline std::array<ggml_tensor *, GGML_MAX_SRC> sources_of(const op_signature &           op,
                                                          std::initializer_list<operand> operands) {
    std::array<ggml_tensor *, GGML_MAX_SRC> sources{};
    GGML_ASSERT((int) operands.size() == op.n_operands);
    for (const operand & each : operands) {
        const bool is_optional = each.index >= op.n_operands - op.n_optional;
        GGML_ASSERT((each.tensor || is_optional) && each.index < op.n_operands && !sources[each.index]);
        sources[each.index] = each.tensor;
    }
    return sources;
}

inline ggml_tensor * finish_node(ggml_tensor * node, const dw_custom_op & op, const void * layer) {
    std::memcpy((char *) node->op_params + layer_at, &layer, sizeof(layer));
    return ggml_set_name(node, op.name());
}

inline bool is_node_of(const ggml_tensor * node, const op_signature & op) {
    return node->op == GGML_OP_CUSTOM && std::strncmp(node->name, op.name, std::strlen(op.name)) == 0;
}

// A node with a result of its own, of shape ne. Its name is the op's.
inline ggml_tensor * new_node(ggml_context * ctx, const dw_custom_op & op, std::array<int64_t, GGML_MAX_DIMS> ne,
                              std::initializer_list<operand> operands, const void * layer = nullptr,
                              ggml_type type = GGML_TYPE_F32) {
    constexpr int most    = GGML_MAX_SRC - 1; // that ggml_custom_4d takes; a node has room for one more
    auto          sources = sources_of(op.reference->signature, operands);
    const int     n       = op.reference->signature.n_operands;
    ggml_tensor * node    = ggml_custom_4d(ctx, type, ne[0], ne[1], ne[2], ne[3], sources.data(), n < most ? n : most,
                                           op.reference->cpu, GGML_N_TASKS_MAX, const_cast<op_descriptor *>(op.of_device));
    node->src[most]       = sources[most];
    return finish_node(node, op, layer);
}

// A node that writes to its first operand in place. Its name is the op's.
inline ggml_tensor * node_in_place(ggml_context * ctx, const dw_custom_op & op, std::initializer_list<operand> operands,
                                   const void * layer = nullptr) {
    auto sources = sources_of(op.reference->signature, operands);
    return finish_node(ggml_custom_inplace(ctx, sources[0], sources.data() + 1, op.reference->signature.n_operands - 1,
                                           op.reference->cpu, GGML_N_TASKS_MAX,
                                           const_cast<op_descriptor *>(op.of_device)),
                       op, layer);
}

} // namespace dw
