// See fused_layers.h and fuser.h.

#include "decode/fused_layers.h"

#include "decode/fuser.h"
#include "decode/pattern.h"
#include "ops/door/registry.h"

#include <algorithm>

namespace draftwood {

static_assert(max_fused_rows == parts::max_rows, "what the ops take");

namespace {

// The device whose own memory holds all of them; nullptr: none, or several. What is pinned on the host for a device is
// the CPU's.
ggml_backend_dev_t device_of(std::initializer_list<ggml_tensor *> weights) {
    ggml_backend_dev_t found = nullptr;
    for (const ggml_tensor * each : weights) {
        if (!each || !each->buffer) {
            return nullptr;
        }
        ggml_backend_buffer_type_t type = ggml_backend_buffer_get_type(each->buffer);
        ggml_backend_dev_t         device =
            ggml_backend_buffer_is_host(each->buffer) ? nullptr : ggml_backend_buft_get_device(type);
        device = device ? device : cpu_device();
        if ((found && device != found) || !ggml_backend_dev_supports_buft(device, type)) {
            return nullptr;
        }
        found = device;
    }
    return found;
}

// The CPU's references multiply by others, too. They are declined there so that graphs are alike on all devices.
bool are_product_weights(std::initializer_list<ggml_tensor *> weights) {
    return std::all_of(weights.begin(), weights.end(), [](const ggml_tensor * each) {
        return !each || (parts::is_product_type(each->type) && parts::is_product_width(each->type, each->ne[0]));
    });
}

// whether a device other than a CPU can run them
bool has_device() {
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        if (ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_CPU &&
            has_op(device, parts::experts::signature)) {
            return true;
        }
    }
    return false;
}

} // namespace

fused_counts fuser::run() {
    find_trees();
    for (ggml_tensor * node : edit_.nodes()) {
        const bool is_front = delta_front(node), is_tree = !is_front && delta_tree(node);
        count(fused_experts, experts(node));
        count(fused_feed_forward, feed_forward(node));
        count(fused_delta_inputs, delta_inputs(node));
        count(fused_delta_front, is_front);
        count(fused_delta_tree, is_tree);
        count(fused_delta_heads, !is_front && !is_tree && delta_heads(node));
        count(fused_delta_step, delta_step(node));
        count(fused_delta_output, delta_output(node));
        count(fused_attention_inputs, attention_inputs(node));
        count(fused_attention_heads, attention_heads(node));
        count(fused_flash_attention, flash_attention(node));
        count(fused_attention_output, attention_output(node));
        count(fused_draft_input, draft_input(node));
        counts_[fused_feature_keys] += feature_keys(node);
        count(fused_product, product(node));
        count(fused_norm, norm_of_head(node));
    }
    edit_.finish();
    return counts_;
}

ggml_tensor * fuser::made(const dw::op_signature & op, std::array<int64_t, GGML_MAX_DIMS> ne,
                          std::initializer_list<dw::operand> operands, std::initializer_list<ggml_tensor *> weights,
                          const parts::settings & with, ggml_type type) {
    ggml_backend_dev_t device = are_product_weights(weights) ? device_of(weights) : nullptr;
    if (!device || (!on_cpu_ && ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU) || !has_op(device, op)) {
        return nullptr;
    }
    ggml_tensor * node = dw::new_node(ctx_, find_op(device, op), ne, operands, nullptr, type);
    parts::set(node, with);
    return ggml_backend_dev_supports_op(device, node) ? node : nullptr;
}

bool fuser::replace(ggml_tensor * result, const std::vector<const ggml_tensor *> & inputs, const ggml_tensor * node,
                    const std::vector<ggml_tensor *> & ended) {
    if (node) {
        edit_.replace(result, ended, inputs, node);
    }
    return node != nullptr;
}

bool fuser::split(const std::vector<ggml_tensor *> & results, const std::vector<const ggml_tensor *> & inputs,
                  ggml_tensor * node, const std::vector<ggml_tensor *> & ended) {
    const bool can = node && std::none_of(results.begin(), results.end(),
                                          [&](const ggml_tensor * each) { return edit_.is_held(each); });
    if (can) {
        edit_.split(results, ended, inputs, node);
    }
    return can;
}

// weights concat(rms_norm(e) * e_norm, rms_norm(h) * h_norm): the beginning of an MTP block
bool fuser::draft_input(ggml_tensor * node) {
    ggml_tensor * joined = as(source(as(node, GGML_OP_MUL_MAT), 1), GGML_OP_CONCAT);
    if (!joined || joined->op_params[0] != 0 || node->src[0]->op != GGML_OP_NONE || !has_few_rows(joined)) {
        return false;
    }
    const norm e = norm::of(joined->src[0]), h = norm::of(joined->src[1]);
    if (!e || !h || e.x->ne[0] != h.x->ne[0] || e.epsilon != h.epsilon || !edit_.is_closed({ node }, { e.x, h.x })) {
        return false;
    }
    namespace op          = parts::draft_input;
    ggml_tensor * weights = node->src[0];
    return replace(node, { e.x, h.x },
                   made(op::signature, { node->ne[0], node->ne[1], 1, 1 },
                        { { op::e, e.x },
                          { op::e_norm, e.weights },
                          { op::h, h.x },
                          { op::h_norm, h.weights },
                          { op::weights, weights } },
                        { weights, e.weights, h.weights }, { e.epsilon, 0, 0 }));
}

namespace {

// rows of `x`; picked: their numbers, nullptr for all in order
struct rows_of_head {
    ggml_tensor *x = nullptr, *picked = nullptr;

    static rows_of_head of(ggml_tensor * head) {
        ggml_tensor * x      = source(as(head, GGML_OP_MUL_MAT), 1);
        ggml_tensor * picked = source(as(x, GGML_OP_GET_ROWS), 1);
        return picked && ggml_is_matrix(x->src[0]) && ggml_is_vector(picked) ? rows_of_head{ x->src[0], picked }
                                                                             : rows_of_head{ x, nullptr };
    }
};

} // namespace

bool fuser::product(ggml_tensor * node) {
    namespace op    = parts::product_of_rows;
    ggml_tensor * x = source(as(node, GGML_OP_MUL_MAT), 1);
    if (!x || (node != logits_ && !is_input(x)) || node->src[0]->op != GGML_OP_NONE || !has_few_rows(node)) {
        return false;
    }
    ggml_tensor * weights = node->src[0];
    const auto    of      = [&](const rows_of_head & rows) {
        std::vector<const ggml_tensor *> inputs{ rows.x };
        if (rows.picked) {
            inputs.push_back(rows.picked);
        }
        return edit_.is_closed({ node }, inputs) &&
               replace(node, inputs,
                               made(op::signature, { node->ne[0], node->ne[1], 1, 1 },
                                    { { op::x, rows.x }, { op::weights, weights }, { op::picked, rows.picked } }, { weights },
                                    {}));
    };
    const rows_of_head rows = rows_of_head::of(node);
    return of(rows) || (rows.picked && of({ x, nullptr })); // somebody reads the picked rows, too
}

bool fuser::norm_of_head(ggml_tensor * node) {
    namespace op               = parts::norm_of_rows;
    ggml_tensor * const scaled = node == logits_ ? rows_of_head::of(node).x : nullptr;
    const norm          normal = norm::of(scaled);
    if (!normal || !has_few_rows(scaled) || !edit_.is_closed({ scaled }, { normal.x })) {
        return false;
    }
    return replace(scaled, { normal.x },
                   made(op::signature, { scaled->ne[0], scaled->ne[1], 1, 1 },
                        { { op::x, normal.x }, { op::norm, normal.weights } }, { normal.weights },
                        { normal.epsilon, 0, 0 }));
}

fused_counts fuse_layers(ggml_context * ctx, ggml_cgraph * graph, const graph_results & results, bool on_cpu) {
    return on_cpu || has_device() ? fuser(ctx, graph, results, on_cpu).run() : fused_counts{};
}

} // namespace draftwood
