// See fused_layers.h.

#include "decode/fused_layers.h"

#include "decode/graph_edit.h"
#include "decode/pattern.h"
#include "ggml-backend.h"
#include "ops/door/node.h"
#include "ops/door/registry.h"
#include "ops/layer-parts/layer-parts.h"

#include <initializer_list>

namespace draftwood {

namespace {

namespace parts = dw::layer_parts;

// The device that holds the weights; nullptr: they have no memory, or lie on several.
ggml_backend_dev_t device_of(std::initializer_list<ggml_tensor *> weights) {
    ggml_backend_dev_t found = nullptr;
    for (const ggml_tensor * each : weights) {
        if (!each || !each->buffer) {
            return nullptr;
        }
        ggml_backend_dev_t device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(each->buffer));
        device                    = device ? device : cpu_device(); // its own buffer types name none
        if (found && device != found) {
            return nullptr;
        }
        found = device;
    }
    return found;
}

class fuser {
  public:
    fuser(ggml_context * ctx, ggml_cgraph * graph, bool on_cpu) :
        ctx_(ctx),
        edit_(graph),
        on_cpu_(on_cpu) {}

    fused_counts run() {
        for (ggml_tensor * node : edit_.nodes()) {
            count(fused_experts, experts(node));
            count(fused_feed_forward, feed_forward(node));
            count(fused_delta_output, delta_output(node));
            count(fused_attention_output, attention_output(node));
            count(fused_delta_inputs, delta_inputs(node));
            count(fused_attention_inputs, attention_inputs(node));
        }
        edit_.finish();
        return counts_;
    }

  private:
    void count(fused_part which, bool found) { counts_[which] += found ? 1 : 0; }

    // A node of the op for the device of these weights; nullptr: it cannot run there.
    ggml_tensor * made(const dw::op_signature & op, std::array<int64_t, GGML_MAX_DIMS> ne,
                       std::initializer_list<dw::operand> operands, std::initializer_list<ggml_tensor *> weights,
                       const parts::settings & with) {
        ggml_backend_dev_t device = device_of(weights);
        if (!device || (!on_cpu_ && ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU) ||
            !has_op(device, op)) {
            return nullptr;
        }
        ggml_tensor * node = dw::new_node(ctx_, find_op(device, op), ne, operands);
        parts::set(node, with);
        return ggml_backend_dev_supports_op(device, node) ? node : nullptr;
    }

    bool replace(ggml_tensor * result, const std::vector<const ggml_tensor *> & inputs, const ggml_tensor * node) {
        if (!node) {
            return false;
        }
        edit_.replace(result, inputs, node);
        return true;
    }

    static bool has_few_rows(const ggml_tensor * x) { return x->ne[1] <= parts::max_rows && ggml_is_matrix(x); }

    bool experts(ggml_tensor * sum);
    bool feed_forward(ggml_tensor * sum);
    bool delta_inputs(ggml_tensor * scaled);
    bool attention_inputs(ggml_tensor * scaled);
    bool delta_output(ggml_tensor * sum);
    bool attention_output(ggml_tensor * sum);

    ggml_context * ctx_;
    graph_edit     edit_;
    bool           on_cpu_;
    fused_counts   counts_{};
};

// the sum of all its planes, as build_moe_ffn adds them: views in order
ggml_tensor * summed(ggml_tensor * sum) {
    ggml_tensor * all = nullptr;
    int64_t       n   = 0;
    for (;; ++n) {
        ggml_tensor * last = as(sum, GGML_OP_ADD) ? sum->src[1] : sum;
        ggml_tensor * of   = source(as(last, GGML_OP_VIEW));
        if (!of || (all && of != all)) {
            return nullptr;
        }
        all = of;
        if (last->view_offs != (size_t) (all->ne[1] - 1 - n) * all->nb[1]) {
            return nullptr;
        }
        if (last == sum) {
            return n + 1 == all->ne[1] ? all : nullptr;
        }
        sum = sum->src[0];
    }
}

// softmax, the best of it, divided by their sum
struct routing {
    ggml_tensor * router = nullptr;
    ggml_tensor * ids    = nullptr;

    static routing of(ggml_tensor * weights, const ggml_tensor * h) {
        ggml_tensor * quotient = as(plain(weights), GGML_OP_DIV);
        ggml_tensor * chosen   = as(plain(source(quotient)), GGML_OP_GET_ROWS);
        ggml_tensor * limited  = as(source(quotient, 1), GGML_OP_CLAMP);
        ggml_tensor * total    = as(source(limited), GGML_OP_SUM_ROWS);
        ggml_tensor * softmax  = as(plain(source(chosen)), GGML_OP_SOFT_MAX);
        ggml_tensor * ids      = source(chosen, 1);
        ggml_tensor * sorted   = as(source(as(ids, GGML_OP_VIEW)), GGML_OP_ARGSORT);
        if (!total || plain(total->src[0]) != chosen || !softmax || softmax->src[1] || source(sorted) != softmax) {
            return {};
        }
        return { weights_times(softmax->src[0], h), ids };
    }
};

// its experts if it is their product with x
ggml_tensor * experts_times(ggml_tensor * tensor, const ggml_tensor * x, const ggml_tensor * ids) {
    ggml_tensor * product = as(tensor, GGML_OP_MUL_MAT_ID);
    return product && product->src[2] == ids && plain(product->src[1]) == x && product->src[0]->op == GGML_OP_NONE
               ? product->src[0]
               : nullptr;
}

// gate and up as one product whose halves they are
bool are_halves(const gated_linear & unit) {
    const ggml_tensor * gate = unit.gate->op == GGML_OP_VIEW ? unit.gate->src[0] : nullptr;
    return gate && unit.up->op == GGML_OP_VIEW && unit.up->src[0] == gate && unit.gate->view_offs == 0 &&
           unit.up->view_offs == unit.gate->ne[0] * sizeof(float) && gate->ne[0] == 2 * unit.gate->ne[0];
}

bool fuser::experts(ggml_tensor * sum) {
    ggml_tensor * both     = as(source(as(sum, GGML_OP_ADD)), GGML_OP_ADD);
    ggml_tensor * x        = source(as(sum, GGML_OP_ADD), 1);
    ggml_tensor * routed   = both ? as(summed(both->src[0]), GGML_OP_MUL) : nullptr;
    ggml_tensor * shared   = as(source(both, 1), GGML_OP_MUL);
    ggml_tensor * lowered  = as(source(routed), GGML_OP_MUL_MAT_ID);
    ggml_tensor * s_low    = as(source(shared), GGML_OP_MUL_MAT);
    ggml_tensor * s_router = as(source(as(source(shared, 1), GGML_UNARY_OP_SIGMOID)), GGML_OP_MUL_MAT);
    if (!lowered || !s_low || !s_router || !has_few_rows(x)) {
        return false;
    }
    ggml_tensor * const h      = s_router->src[1];
    const norm          normal = norm::of(h);
    const routing       chosen = routing::of(routed->src[1], h);
    const gated_linear  unit = gated_linear::of(lowered->src[1]), s_unit = gated_linear::of(s_low->src[1]);
    if (normal.x != x || !chosen.router || !unit || !s_unit || lowered->src[2] != chosen.ids) {
        return false;
    }
    const bool    is_joint = are_halves(unit);
    ggml_tensor * gate     = experts_times(is_joint ? unit.gate->src[0] : unit.gate, h, chosen.ids);
    ggml_tensor * up       = is_joint ? gate : experts_times(unit.up, h, chosen.ids);
    ggml_tensor * s_gate = weights_times(s_unit.gate, h), *s_up = weights_times(s_unit.up, h);
    if (!gate || !up || !s_gate || !s_up || lowered->src[0]->op != GGML_OP_NONE || s_low->src[0]->op != GGML_OP_NONE ||
        s_router->src[0]->op != GGML_OP_NONE || !edit_.is_closed({ sum }, { x })) {
        return false;
    }
    namespace op = parts::experts;
    return replace(sum, { x },
                   made(op::signature, { sum->ne[0], sum->ne[1], 1, 1 },
                        { { op::x, x },
                          { op::norm, normal.weights },
                          { op::router, chosen.router },
                          { op::gate, gate },
                          { op::up, up },
                          { op::down, lowered->src[0] },
                          { op::shared_router, s_router->src[0] },
                          { op::shared_gate, s_gate },
                          { op::shared_up, s_up },
                          { op::shared_down, s_low->src[0] } },
                        { normal.weights, chosen.router, gate, up, lowered->src[0], s_router->src[0], s_gate, s_up,
                          s_low->src[0] },
                        { normal.epsilon, (int32_t) chosen.ids->ne[0], is_joint ? 1 : 0 }));
}

bool fuser::feed_forward(ggml_tensor * sum) {
    ggml_tensor *      x       = source(as(sum, GGML_OP_ADD), 1);
    ggml_tensor *      lowered = as(source(as(sum, GGML_OP_ADD)), GGML_OP_MUL_MAT);
    const gated_linear unit    = gated_linear::of(source(lowered, 1));
    ggml_tensor *      h       = unit ? source(as(unit.gate, GGML_OP_MUL_MAT), 1) : nullptr;
    const norm         normal  = norm::of(h);
    if (!normal || normal.x != x || lowered->src[0]->op != GGML_OP_NONE || !has_few_rows(x)) {
        return false;
    }
    ggml_tensor *gate = weights_times(unit.gate, h), *up = weights_times(unit.up, h), *down = lowered->src[0];
    if (!gate || !up || !edit_.is_closed({ sum }, { x })) {
        return false;
    }
    namespace op = parts::feed_forward;
    return replace(
        sum, { x },
        made(op::signature, { sum->ne[0], sum->ne[1], 1, 1 },
             { { op::x, x }, { op::norm, normal.weights }, { op::gate, gate }, { op::up, up }, { op::down, down } },
             { normal.weights, gate, up, down }, { normal.epsilon, 0, 0 }));
}

// sigmoid(weights h)
ggml_tensor * sigmoid_of(ggml_tensor * product, const graph_edit & edit) {
    const auto & shaped = edit.users(product);
    const auto & users  = shaped.size() == 1 && shaped[0]->op == GGML_OP_RESHAPE ? edit.users(shaped[0]) : shaped;
    return users.size() == 1 ? as(users[0], GGML_UNARY_OP_SIGMOID) : nullptr;
}

// softplus(weights h + dt) * a
ggml_tensor * decay_of(ggml_tensor * product, const graph_edit & edit) {
    const auto only = [&](const ggml_tensor * of) {
        const auto & users = of ? edit.users(of) : edit.users(nullptr);
        return users.size() == 1 ? users[0] : nullptr;
    };
    ggml_tensor * shaped = only(product);
    ggml_tensor * biased = as(as(shaped, GGML_OP_RESHAPE) ? only(shaped) : shaped, GGML_OP_ADD);
    return as(only(as(only(biased), GGML_UNARY_OP_SOFTPLUS)), GGML_OP_MUL);
}

bool fuser::delta_inputs(ggml_tensor * scaled) {
    const norm   normal = norm::of(scaled);
    const auto & users  = edit_.users(scaled);
    if (!normal || users.size() != 4 || !has_few_rows(normal.x)) {
        return false;
    }
    ggml_tensor *              beta = nullptr, *decay = nullptr, *w_beta = nullptr, *w_alpha = nullptr;
    std::vector<ggml_tensor *> plain_ones;
    for (ggml_tensor * product : users) {
        ggml_tensor * weights = weights_times(product, scaled);
        if (!weights) {
            return false;
        }
        if (ggml_tensor * found = sigmoid_of(product, edit_)) {
            beta   = found;
            w_beta = weights;
        } else if ((found = decay_of(product, edit_))) {
            decay   = found;
            w_alpha = weights;
        } else {
            plain_ones.push_back(product);
        }
    }
    if (!beta || !decay || plain_ones.size() != 2) {
        return false;
    }
    ggml_tensor *                    qkv = plain_ones[0], *z = plain_ones[1];
    ggml_tensor *                    dt = decay->src[0]->src[0]->src[1], *a = decay->src[1];
    const std::vector<ggml_tensor *> results{ qkv, z, beta, decay };
    if (dt->op != GGML_OP_NONE || a->op != GGML_OP_NONE || !edit_.is_closed(results, { normal.x })) {
        return false;
    }
    int64_t n_values = 0;
    for (const ggml_tensor * each : results) {
        if (!ggml_is_contiguous(each)) {
            return false;
        }
        n_values += ggml_nelements(each);
    }
    namespace op = parts::delta_inputs;
    ggml_tensor * node =
        made(op::signature, { n_values, 1, 1, 1 },
             { { op::x, normal.x },
               { op::norm, normal.weights },
               { op::qkv, qkv->src[0] },
               { op::z, z->src[0] },
               { op::beta, w_beta },
               { op::alpha, w_alpha },
               { op::dt, dt },
               { op::a, a } },
             { normal.weights, qkv->src[0], z->src[0], w_beta, w_alpha, dt, a }, { normal.epsilon, 0, 0 });
    if (node) {
        edit_.replace(results, { normal.x }, node);
    }
    return node != nullptr;
}

bool fuser::attention_inputs(ggml_tensor * scaled) {
    const norm                       normal  = norm::of(scaled);
    const std::vector<ggml_tensor *> results = edit_.users(scaled);
    if (!normal || results.size() != 3 || !has_few_rows(normal.x)) {
        return false;
    }
    int64_t n_values = 0;
    for (ggml_tensor * product : results) {
        if (!weights_times(product, scaled) || !ggml_is_contiguous(product)) {
            return false;
        }
        n_values += ggml_nelements(product);
    }
    if (!edit_.is_closed(results, { normal.x })) {
        return false;
    }
    ggml_tensor *q = results[0]->src[0], *k = results[1]->src[0], *v = results[2]->src[0];
    namespace op = parts::attention_inputs;
    ggml_tensor * node =
        made(op::signature, { n_values, 1, 1, 1 },
             { { op::x, normal.x }, { op::norm, normal.weights }, { op::q, q }, { op::k, k }, { op::v, v } },
             { normal.weights, q, k, v }, { normal.epsilon, 0, 0 });
    if (node) {
        edit_.replace(results, { normal.x }, node);
    }
    return node != nullptr;
}

bool fuser::delta_output(ggml_tensor * sum) {
    ggml_tensor * residual = source(as(sum, GGML_OP_ADD), 1);
    ggml_tensor * product  = as(plain(source(as(sum, GGML_OP_ADD))), GGML_OP_MUL_MAT);
    ggml_tensor * gated    = as(plain(source(product, 1)), GGML_OP_MUL);
    ggml_tensor * silu     = as(source(gated, 1), GGML_UNARY_OP_SILU);
    const norm    normal   = norm::of(source(gated));
    if (!silu || !normal || product->src[0]->op != GGML_OP_NONE || !has_few_rows(residual)) {
        return false;
    }
    ggml_tensor *y = normal.x, *z = silu->src[0], *weights = product->src[0];
    if (!edit_.is_closed({ sum }, { y, z, residual })) {
        return false;
    }
    namespace op = parts::delta_output;
    return replace(sum, { y, z, residual },
                   made(op::signature, { sum->ne[0], sum->ne[1], 1, 1 },
                        { { op::y, y },
                          { op::z, z },
                          { op::norm, normal.weights },
                          { op::weights, weights },
                          { op::residual, residual } },
                        { normal.weights, weights }, { normal.epsilon, 0, 0 }));
}

bool fuser::attention_output(ggml_tensor * sum) {
    ggml_tensor * residual = source(as(sum, GGML_OP_ADD), 1);
    ggml_tensor * product  = as(source(as(sum, GGML_OP_ADD)), GGML_OP_MUL_MAT);
    ggml_tensor * gated    = as(source(product, 1), GGML_OP_MUL);
    ggml_tensor * copied   = as(source(as(source(gated, 1), GGML_UNARY_OP_SIGMOID)), GGML_OP_CONT);
    ggml_tensor * gate     = as(source(copied), GGML_OP_VIEW);
    if (!gate || product->src[0]->op != GGML_OP_NONE || !has_few_rows(residual)) {
        return false;
    }
    ggml_tensor *y = gated->src[0], *weights = product->src[0];
    if (!edit_.is_closed({ sum }, { y, gate, residual })) {
        return false;
    }
    namespace op = parts::attention_output;
    return replace(sum, { y, gate, residual },
                   made(op::signature, { sum->ne[0], sum->ne[1], 1, 1 },
                        { { op::y, y }, { op::gate, gate }, { op::weights, weights }, { op::residual, residual } },
                        { weights }, {}));
}

} // namespace

fused_counts fuse_layers(ggml_context * ctx, ggml_cgraph * graph, bool on_cpu) {
    return fuser(ctx, graph, on_cpu).run();
}

} // namespace draftwood
