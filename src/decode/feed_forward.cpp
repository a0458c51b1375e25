// What the feed-forward halves of layers look like in llama.cpp's graphs: see fuser.h.

#include "decode/fuser.h"
#include "decode/pattern.h"

#include <cstring>

namespace draftwood {

namespace {

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
        if (!total || plain(total->src[0]) != chosen || !softmax || source(sorted) != softmax || ids->view_offs != 0 ||
            sorted->op_params[0] != GGML_SORT_ORDER_DESC || !is_plain(softmax) || !is_no_limit(limited)) {
            return {};
        }
        return { weights_times(softmax->src[0], h), ids };
    }

  private:
    // neither mask, sinks, scale nor bias
    static bool is_plain(const ggml_tensor * softmax) {
        float scale[2]; // and bias
        std::memcpy(scale, softmax->op_params, sizeof(scale));
        return !softmax->src[1] && !softmax->src[2] && scale[0] == 1.0f && scale[1] == 0.0f;
    }
    // of a sum of probabilities: the largest of at most `max_experts` is never as little
    static bool is_no_limit(const ggml_tensor * clamp) {
        float range[2];
        std::memcpy(range, clamp->op_params, sizeof(range));
        return range[0] < 1.0f / parts::max_experts && range[1] > 1.0f;
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

} // namespace

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

} // namespace draftwood
