// See product.h.

#include "experts/product.h"

#include "experts/beside.h"
#include "experts/guess.h"
#include "experts/pool.h"
#include "ops/door/node.h"
#include "ops/door/registry.h"

namespace draftwood {

namespace slots = dw::expert_slots;

namespace {

// The nodes of planes 0.. stand together at the end of a graph: [slots, ready], or [slots, ready, view 0, view 1, ..].
ggml_tensor * newest_plane(ggml_cgraph * graph, const slots::layer & of, int32_t plane, const ggml_tensor * ids) {
    const int n_nodes = of.n_planes == 1 ? 2 : 2 + of.n_planes;
    if (ggml_graph_n_nodes(graph) < n_nodes) {
        return nullptr;
    }
    const ggml_tensor * op = ggml_graph_node(graph, -n_nodes);
    const bool is_it = dw::is_node_of(op, slots::signature) && op->src[slots::ids] == ids && dw::layer_of(op) == &of;
    return is_it ? ggml_graph_node(graph, plane - of.n_planes) : nullptr;
}

void add_planes(ggml_context * ctx, ggml_cgraph * graph, const slots::layer & of, ggml_tensor * ids,
                ggml_backend_dev_t device) {
    const dw_custom_op op    = find_op(device, slots::signature);
    ggml_tensor *      all   = dw::new_node(ctx, op, { ids->ne[0], ids->ne[1], of.n_planes, 1 },
                                            { { slots::ids, ids }, { slots::guesses, nullptr } }, &of, GGML_TYPE_I32);
    ggml_tensor *      ready = dw::node_in_place(ctx, find_op(device, slots::ready_signature),
                                                 { { slots::indices, all }, { slots::choice, ids } }, &of);
    ggml_build_forward_expand(graph, ready);
    for (int32_t plane = 0; of.n_planes > 1 && plane < of.n_planes; ++plane) {
        ggml_tensor * view = ggml_view_2d(ctx, ready, all->ne[0], all->ne[1], all->nb[1], plane * all->nb[2]);
        ggml_build_forward_expand(graph, view);
    }
}

// the newest node of that op; nullptr: the last layer has none
ggml_tensor * newest(ggml_cgraph * graph, const dw::op_signature & op) {
    constexpr int most = 512; // nodes of a layer
    const int     end  = ggml_graph_n_nodes(graph);
    for (int i = end - 1; i >= 0 && i > end - most; --i) {
        if (dw::is_node_of(ggml_graph_node(graph, i), op)) {
            return ggml_graph_node(graph, i);
        }
    }
    return nullptr;
}

// The layer before this one, if it is in the graph with as many rows, may copy this one's experts ahead.
void tell_layer_before(ggml_cgraph * graph, const slots::layer & of, const ggml_tensor * ids, ggml_backend_dev_t device,
                       bool watched) {
    ggml_tensor * node = newest(graph, slots::signature);
    if (node && ((const slots::layer *) dw::layer_of(node))->next == &of &&
        node->src[slots::ids]->ne[1] == ids->ne[1]) {
        slots::set(node, slots::has_next);
        if (!watched && stays_on(graph, node, device)) {
            slots::set(node, slots::next_is_joined);
        }
    }
}

// The layer before this one is whole now: what its input says of this one's experts can be fetched, and its own copies
// can run beside what needs none of them. A second queue costs each launch of a step 0.2 us on an H200, which copies
// beside a shared expert alone do not earn.
void let_layer_before_compute(ggml_context * ctx, ggml_cgraph * graph, expert_pool & pool, const slots::layer & next,
                              const ggml_tensor * ids) {
    ggml_tensor * ready = pool.guesses() ? newest(graph, slots::ready_signature) : nullptr;
    if (!ready) {
        return;
    }
    ggml_tensor *            node   = ready->src[slots::indices];
    const slots::layer &     of     = *(const slots::layer *) dw::layer_of(node);
    const ggml_backend_dev_t device = pool.buffer_type().device();
    if (&of == &next || slots::only_looks_up(of, node->src[slots::ids]->ne[0], node->src[slots::ids]->ne[1])) {
        return;
    }
    if (!stays_on(graph, node, device) || !add_guess(ctx, graph, node, ids, next, device)) {
        return;
    }
    if (move_in_front(graph, ready, device) > 0) {
        slots::set(node, slots::copies_beside);
        pool.computes_beside(of);
    }
}

// The weights with their slots, as one tensor. ggml has no views that reach over the end of what they view.
ggml_tensor * with_slots(ggml_context * ctx, ggml_tensor * weights, int64_t n_indices) {
    ggml_tensor * all = ggml_new_tensor_3d(ctx, weights->type, weights->ne[0], weights->ne[1], n_indices);
    all->data         = weights->data;
    all->buffer       = weights->buffer;
    return ggml_format_name(all, "%s (slots)", weights->name);
}

} // namespace

ggml_tensor * pooled_product(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * weights, ggml_tensor * x,
                             ggml_tensor * ids, bool watched) {
    expert_pool * pool = expert_pool::of(weights);
    if (!pool) {
        return nullptr;
    }
    const auto [layer, part] = pool->place_of(weights);
    if (!layer || (layer->n_slots == 0 && !layer->stages(ids->ne[1]))) {
        return nullptr;
    }
    ggml_tensor * indices = newest_plane(graph, *layer, part->plane, ids);
    if (!indices) {
        if (layer->stages(ids->ne[1])) {
            tell_layer_before(graph, *layer, ids, pool->buffer_type().device(), watched);
        }
        if (!watched) {
            let_layer_before_compute(ctx, graph, *pool, *layer, ids);
        }
        add_planes(ctx, graph, *layer, ids, pool->buffer_type().device());
        indices = newest_plane(graph, *layer, part->plane, ids);
    }
    ggml_tensor * all = with_slots(ctx, weights, layer->n_indices(*part, ids->ne[1]));
    return ggml_mul_mat_id(ctx, all, x, indices);
}

} // namespace draftwood
