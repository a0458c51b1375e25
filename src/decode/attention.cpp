// What attention layers look like in llama.cpp's graphs: see fuser.h.

#include "decode/cached_heads.h"
#include "decode/fuser.h"
#include "decode/pattern.h"
#include "ops/tree-delta-net/tree-ops.h"

#include <algorithm>
#include <cstring>

namespace draftwood {

// Products of one input that is normalised, most_weights at most.
ggml_tensor * fuser::made_inputs(const norm & normal, const std::vector<ggml_tensor *> & products) {
    namespace op   = parts::attention_inputs;
    const auto ask = [&](size_t i) { return i < products.size() ? products[i]->src[0] : nullptr; };
    const auto any = [&](size_t i) { return products[std::min(i, products.size() - 1)]->src[0]; };
    int64_t    n   = 0;
    for (const ggml_tensor * product : products) {
        n += ggml_nelements(product);
    }
    static_assert(op::most_weights == 8, "so many are listed here");
    return made(op::signature, { n, 1, 1, 1 },
                { { op::x, normal.x },
                  { op::norm, normal.weights },
                  { op::weights, ask(0) },
                  { op::weights + 1, ask(1) },
                  { op::weights + 2, ask(2) },
                  { op::weights + 3, ask(3) },
                  { op::weights + 4, ask(4) },
                  { op::weights + 5, ask(5) },
                  { op::weights + 6, ask(6) },
                  { op::weights + 7, ask(7) } },
                { normal.weights, any(0), any(1), any(2), any(3), any(4), any(5), any(6), any(7) },
                { normal.epsilon, 0, 0 });
}

// Products of one normalised input, in as few nodes as there can be; false: nothing is changed
bool fuser::split_products(const norm & normal, const std::vector<ggml_tensor *> & products) {
    constexpr size_t                        most = parts::attention_inputs::most_weights;
    std::vector<std::vector<ggml_tensor *>> some;
    std::vector<ggml_tensor *>              nodes;
    for (size_t i = 0; i < products.size(); i += most) {
        some.emplace_back(products.begin() + i, products.begin() + std::min(i + most, products.size()));
        nodes.push_back(made_inputs(normal, some.back()));
    }
    const auto can = [&](const ggml_tensor * each) { return ggml_is_contiguous(each) && !edit_.is_held(each); };
    if (std::find(nodes.begin(), nodes.end(), nullptr) != nodes.end() ||
        !std::all_of(products.begin(), products.end(), can) || !edit_.is_closed(products, { normal.x })) {
        return false;
    }
    for (size_t i = 0; i < nodes.size(); ++i) {
        edit_.split(some[i], {}, { normal.x }, nodes[i]);
    }
    return true;
}

bool fuser::attention_inputs(ggml_tensor * scaled) {
    const norm normal = norm::of(scaled);
    const auto users  = edit_.users(scaled);
    if (!normal || users.size() != 3 || !has_few_rows(normal.x)) {
        return false;
    }
    const auto is_product = [&](ggml_tensor * user) { return weights_times(user, scaled) != nullptr; };
    return std::all_of(users.begin(), users.end(), is_product) &&
           split_products(normal, { users.begin(), users.end() });
}

// Queries in the shape of `shape`; keys and values go to their caches.
ggml_tensor * fuser::made_heads(const turned_heads & q, const turned_heads & k, ggml_tensor * v, int32_t v_hadamard,
                                const ggml_tensor * shape, const cache_write & keys, const cache_write & values) {
    namespace op         = parts::attention_heads;
    parts::settings with = q.with;
    with.v_hadamard      = v_hadamard;
    return made(op::signature, { shape->ne[0], shape->ne[1], shape->ne[2], 1 },
                { { op::q, q.heads },
                  { op::q_norm, q.weights },
                  { op::k, k.heads },
                  { op::k_norm, k.weights },
                  { op::v, v },
                  { op::positions, q.positions },
                  { op::k_cells, keys.cells },
                  { op::k_cache, keys.cache },
                  { op::v_cells, values.cells },
                  { op::v_cache, values.cache } },
                { q.weights, k.weights, owner_of(keys.cache), owner_of(values.cache) }, with);
}

bool fuser::attention_heads(ggml_tensor * scaled) {
    const auto products = edit_.users(scaled);
    if (!norm::of(scaled) || products.size() != 3 || !has_few_rows(scaled)) {
        return false;
    }
    // in the graph's order; keys are the last, or where some layers have a sliding window the second
    const turned_heads last   = turned_heads::of(products[2], edit_);
    const turned_heads q      = turned_heads::of(products[0], edit_);
    const turned_heads k      = last ? last : turned_heads::of(products[1], edit_);
    ggml_tensor *      value  = products[last ? 1 : 2];
    const cache_write  keys   = cache_write::of(k.result, edit_);
    ggml_tensor *      shaped = edit_.only_user(value);
    const hadamard     behind = hadamard::of(as(shaped, GGML_OP_RESHAPE), edit_);
    const cache_write  values = cache_write::of(behind ? behind.result : shaped, edit_);
    if (!q || !keys || !values || !q.turns_as(k) || values.node->src[0]->ne[0] % q.heads->ne[0] != 0 ||
        !is_input(q.positions) || !is_input(keys.cells) || !is_input(values.cells)) {
        return false;
    }
    ggml_tensor *                          v = behind ? value : values.node->src[0];
    const std::vector<const ggml_tensor *> inputs{ q.heads,    k.heads,      v,          q.positions,
                                                   keys.cells, values.cells, keys.cache, values.cache };
    if (!edit_.is_closed({ q.result, keys.node, values.node }, inputs)) {
        return false;
    }
    ggml_tensor * node = made_heads(q, k, v, behind.n, q.result, keys, values);
    // it needs keys and values, which are computed after the queries
    const std::vector<ggml_tensor *> writes{ keys.node, values.node };
    return node && edit_.postpone(q.result, writes, inputs) && replace(q.result, inputs, node, writes);
}

// A verify's nodes of delta-net layers name its tree, of which each device has its own (verify/tree_device.h).
void fuser::find_trees() {
    namespace from = dw::tree_conv_windows;
    for (ggml_tensor * node : edit_.nodes()) {
        ggml_tensor * tree = dw::is_node_of(node, from::signature) ? node->src[from::tree] : nullptr;
        if (tree && std::find(trees_.begin(), trees_.end(), tree) == trees_.end()) {
            trees_.push_back(tree);
        }
    }
}

ggml_tensor * fuser::tree_for(ggml_tensor * cache) const {
    const auto is_there = [&](const ggml_tensor * tree) {
        return tree->buffer && cache->buffer &&
               ggml_backend_buffer_get_type(tree->buffer) == ggml_backend_buffer_get_type(cache->buffer);
    };
    const auto found = std::find_if(trees_.begin(), trees_.end(), is_there);
    return found != trees_.end() ? *found : trees_.empty() ? nullptr : trees_[0];
}

namespace {

// the product that queries are made of, whatever is between
const ggml_tensor * product_of(const ggml_tensor * q) {
    while (q && (q->op != GGML_OP_MUL_MAT || is_hadamard(q))) {
        q = q->src[is_hadamard(q) ? 1 : 0];
    }
    return q;
}

// what heads are multiplied with, by its sigmoid
ggml_tensor * gate_in(ggml_tensor * gated) {
    ggml_tensor * copied = as(source(as(source(gated, 1), GGML_UNARY_OP_SIGMOID)), GGML_OP_CONT);
    return as(source(copied), GGML_OP_VIEW);
}

// What becomes of the heads that attention gives.
struct end_of_attention {
    bool          can_make_input = false;   // attention can write what the product behind it reads
    ggml_tensor * gate           = nullptr; // what heads are multiplied with before; nullptr: nothing

    // shaped: heads side by side
    static end_of_attention of(ggml_tensor * q, ggml_tensor * shaped, const graph_edit & edit) {
        ggml_tensor * next   = edit.only_user(shaped);
        ggml_tensor * gated  = as(next, GGML_OP_MUL);
        ggml_tensor * gate   = gate_in(gated);
        ggml_tensor * output = as(gated ? edit.only_user(gated) : next, GGML_OP_MUL_MAT);
        if (!output || output->src[1] != (gated ? gated : shaped) || !is_quantised(output->src[0])) {
            return {};
        }
        // a gate lies beside the queries, so that it may be computed behind them
        const bool is_there =
            gate && gated->src[0] == shaped && gate->src[0] == product_of(q) && edit.array_of(gate->src[0]);
        return { !gated || is_there, is_there ? gate : nullptr };
    }
};

} // namespace

bool fuser::flash_attention(ggml_tensor * node) {
    ggml_tensor * q = source(as(node, GGML_OP_FLASH_ATTN_EXT));
    if (!q || !node->src[3] || node->src[4] || q->ne[1] * q->ne[3] > parts::max_rows) { // mask, sinks
        return false;
    }
    float with[3]; // scale, slope of ALiBi, cap of scores
    std::memcpy(with, node->op_params, sizeof(with));
    ggml_tensor * k = node->src[1], *v = node->src[2], *mask = node->src[3];
    const int64_t size = node->ne[0];
    if (!parts::is_attention_size(size) || q->ne[0] != size || k->ne[0] != size || with[1] != 0.0f || with[2] != 0.0f ||
        !parts::is_attention_type(k->type) || v->type != k->type || !is_input(mask)) {
        return false;
    }
    const hadamard                         behind = hadamard::of(node, edit_);
    ggml_tensor *                          y      = behind ? behind.result : node;
    const std::vector<const ggml_tensor *> inputs{ q, k, v, mask };
    if (!edit_.is_closed({ y }, inputs)) {
        return false;
    }
    namespace op         = parts::flash_attention;
    const auto attention = [&](ggml_tensor * gate, std::array<int64_t, GGML_MAX_DIMS> ne) {
        parts::settings to;
        to.scale      = with[0];
        to.v_hadamard = behind.n;
        return made(op::signature, ne,
                    { { op::q, q },
                      { op::k, k },
                      { op::v, v },
                      { op::mask, mask },
                      { op::tree, tree_for(owner_of(k)) },
                      { op::gate, gate } },
                    { owner_of(k), owner_of(v) }, to);
    };
    ggml_tensor *          shaped = behind ? y : as(edit_.only_user(y), GGML_OP_RESHAPE);
    const end_of_attention end    = end_of_attention::of(q, shaped, edit_);
    const int64_t          width = size * node->ne[1], n_values = (width + op::n_gated(width)) * q->ne[1] * q->ne[3];
    ggml_tensor *          ahead = end.can_make_input ? attention(end.gate, { n_values, 1, 1, 1 }) : nullptr;
    if (split({ y }, inputs, ahead)) {
        ahead_[plain(y)] = ahead;
        count(fused_attention_gates, end.gate);
        return true;
    }
    return replace(y, inputs, attention(nullptr, { y->ne[0], y->ne[1], y->ne[2], y->ne[3] }));
}

bool fuser::attention_output(ggml_tensor * sum) {
    ggml_tensor * residual = source(as(sum, GGML_OP_ADD), 1);
    ggml_tensor * product  = as(source(as(sum, GGML_OP_ADD)), GGML_OP_MUL_MAT);
    ggml_tensor * gated    = as(source(product, 1), GGML_OP_MUL);
    ggml_tensor * gate     = gate_in(gated);
    ggml_tensor * y        = gate ? gated->src[0] : source(product, 1);
    const bool    is_end   = gate || as(plain(y), GGML_OP_FLASH_ATTN_EXT) || is_hadamard(plain(y));
    if (!is_end || product->src[0]->op != GGML_OP_NONE || !has_few_rows(residual) ||
        !ggml_are_same_shape(residual, sum)) { // a bias has one row
        return false;
    }
    std::vector<const ggml_tensor *> inputs{ y, residual };
    if (gate) {
        inputs.push_back(gate);
    }
    if (!edit_.is_closed({ sum }, inputs)) {
        return false;
    }
    namespace op          = parts::attention_output;
    ggml_tensor * weights = product->src[0];
    const auto    ahead   = ahead_.find(plain(y));
    return replace(sum, inputs,
                   made(op::signature, { sum->ne[0], sum->ne[1], 1, 1 },
                        { { op::y, y },
                          { op::weights, weights },
                          { op::residual, residual },
                          { op::gate, gate },
                          { op::gated, ahead == ahead_.end() ? nullptr : ahead->second } },
                        { weights }, {}));
}

} // namespace draftwood
