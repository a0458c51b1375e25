// See guess.h.

#include "experts/guess.h"

#include "ggml-impl.h"
#include "ops/door/node.h"
#include "ops/door/registry.h"
#include "ops/expert-slots/guess.h"

#include <algorithm>

namespace draftwood {

namespace slots = dw::expert_slots;

namespace {

bool passes_values_on(const ggml_tensor * node) {
    return node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_CONT;
}

const ggml_tensor * behind_views(const ggml_tensor * node) {
    while (node && passes_values_on(node)) {
        node = node->src[0];
    }
    return node;
}

// What a router reads: hidden f32[n_embd, R] through a norm's weights. nullptr: it is built in another way.
struct router_inputs {
    ggml_tensor * hidden = nullptr;
    ggml_tensor * norm   = nullptr;
    ggml_tensor * router = nullptr;
};

bool is_weight(const ggml_tensor * tensor) {
    return tensor && tensor->op == GGML_OP_NONE && tensor->buffer && tensor->type == GGML_TYPE_F32;
}

router_inputs inputs_of(const ggml_tensor * ids, int64_t n_experts) {
    constexpr int       most_steps = 16; // from the choice up to the product: softmax, a bias, groups
    const ggml_tensor * node       = ids;
    for (int i = 0; node && node->op != GGML_OP_MUL_MAT && i < most_steps; ++i) {
        node = node->src[0];
    }
    if (!node || node->op != GGML_OP_MUL_MAT || !is_weight(node->src[0]) || node->src[0]->ne[1] != n_experts) {
        return {};
    }
    const ggml_tensor * scaled = behind_views(node->src[1]);
    if (!scaled || scaled->op != GGML_OP_MUL || !is_weight(scaled->src[1]) || !scaled->src[0] ||
        scaled->src[0]->op != GGML_OP_RMS_NORM) {
        return {};
    }
    return { scaled->src[0]->src[0], scaled->src[1], node->src[0] };
}

} // namespace

bool add_guess(ggml_context * ctx, ggml_cgraph * graph, const ggml_tensor * choice, const ggml_tensor * ids,
               const slots::layer & next, ggml_backend_dev_t device) {
    const ggml_tensor * own    = choice->src[slots::ids];
    const router_inputs before = inputs_of(own, ((const slots::layer *) dw::layer_of(choice))->n_experts);
    const router_inputs coming = inputs_of(ids, next.n_experts);
    if (!before.hidden || !coming.hidden || own->ne[1] != ids->ne[1] || ids->ne[1] > slots::max_guess_rows ||
        before.hidden->ne[0] != coming.router->ne[0] || before.hidden->ne[1] != ids->ne[1] ||
        !has_op(device, slots::guess_signature) || next.n_slots == 0) {
        return false;
    }
    ggml_tensor ** const place = std::find(graph->nodes, graph->nodes + graph->n_nodes, choice);
    if (place == graph->nodes + graph->n_nodes) {
        return false;
    }
    ggml_tensor * node = dw::new_node(
        ctx, find_op(device, slots::guess_signature), { 1, 1, 1, 1 },
        { { slots::hidden, before.hidden }, { slots::norm, coming.norm }, { slots::router, coming.router } }, &next,
        GGML_TYPE_I32);
    slots::set_number(node, (int32_t) ids->ne[0]);
    const int at = (int) (place - graph->nodes) + 1;
    ggml_build_forward_expand(graph, node);
    ggml_tensor ** const end = graph->nodes + graph->n_nodes;
    std::rotate(graph->nodes + at, end - 1, end);
    return true;
}

} // namespace draftwood
