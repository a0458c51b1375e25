// How the fuser's patterns look at a graph: each step returns nullptr where the graph is another, so that
// steps follow each other without questions. Test: tests/model/test_fused_layers.py.

#pragma once

#include "ggml.h"

#include <cstring>

namespace draftwood {

// the tensor, if it is the result of this op
inline ggml_tensor * as(ggml_tensor * tensor, ggml_op op) {
    return tensor && tensor->op == op ? tensor : nullptr;
}

inline ggml_tensor * as(ggml_tensor * tensor, ggml_unary_op op) {
    return as(tensor, GGML_OP_UNARY) && ggml_get_unary_op(tensor) == op ? tensor : nullptr;
}

inline ggml_tensor * source(ggml_tensor * tensor, int i = 0) {
    return tensor ? tensor->src[i] : nullptr;
}

// what a tensor is a reshaped form of
inline ggml_tensor * plain(ggml_tensor * tensor) {
    while (as(tensor, GGML_OP_RESHAPE)) {
        tensor = tensor->src[0];
    }
    return tensor;
}

// whose memory a view names
inline ggml_tensor * owner_of(ggml_tensor * tensor) {
    return tensor->view_src ? tensor->view_src : tensor;
}

// an input of the graph, or a view of one: its values are there before the graph begins
inline bool is_input(ggml_tensor * tensor) {
    const ggml_tensor * all = owner_of(tensor);
    return all->op == GGML_OP_NONE && (all->flags & GGML_TENSOR_FLAG_INPUT) != 0;
}

// its weights if it is a product of weights with `x`, however shaped
inline ggml_tensor * weights_times(ggml_tensor * tensor, const ggml_tensor * x) {
    ggml_tensor * product = as(tensor, GGML_OP_MUL_MAT);
    return product && plain(product->src[1]) == x && product->src[0]->op == GGML_OP_NONE ? product->src[0] : nullptr;
}

// whether it is a Walsh-Hadamard transform of its second source, as llama.cpp puts around a quantised KV cache
inline bool is_hadamard(const ggml_tensor * tensor) {
    return tensor && tensor->op == GGML_OP_MUL_MAT && tensor->op_params[1] == GGML_HINT_SRC0_IS_HADAMARD &&
           is_input(tensor->src[0]);
}

// rms_norm(x) * weights, of F32
struct norm {
    ggml_tensor * x       = nullptr;
    ggml_tensor * weights = nullptr;
    float         epsilon = 0.0f;

    static norm of(ggml_tensor * tensor) {
        ggml_tensor * scaled = as(tensor, GGML_OP_MUL);
        ggml_tensor * inner  = as(source(scaled), GGML_OP_RMS_NORM);
        norm          found;
        if (inner && scaled->src[1]->op == GGML_OP_NONE && scaled->src[1]->type == GGML_TYPE_F32) {
            found = { inner->src[0], scaled->src[1], 0.0f };
            std::memcpy(&found.epsilon, inner->op_params, sizeof(float));
        }
        return found;
    }
    explicit operator bool() const { return x != nullptr; }
};

// silu(gate) * up
struct gated_linear {
    ggml_tensor * gate = nullptr;
    ggml_tensor * up   = nullptr;

    static gated_linear of(ggml_tensor * tensor) {
        ggml_tensor * unit = as(tensor, GGML_OP_GLU);
        if (!unit || !unit->src[1] || ggml_get_glu_op(unit) != GGML_GLU_OP_SWIGLU) {
            return {};
        }
        return { unit->src[0], unit->src[1] };
    }
    explicit operator bool() const { return gate != nullptr; }
};

} // namespace draftwood
