// What the feed-forward halves of layers look like in llama.cpp's graphs: see fuser.h.

#include "decode/fuser.h"
#include "decode/pattern.h"
#include "ops/expert-slots/expert-slots.h"
#include "ops/expert-slots/guess.h"

#include <algorithm>
#include <cstring>

namespace draftwood {

namespace pool = dw::expert_slots;

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
    ggml_tensor * sorted = nullptr; // all experts, of which `ids` are the first

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
        return { weights_times(softmax->src[0], h), ids, sorted };
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

// Where products find the experts that were chosen: by their own numbers, or in a pool, a plane of its indices a part.
struct indices_of {
    ggml_tensor * all   = nullptr; // dw_expert_ready's; nullptr: by number
    int32_t       plane = 0;

    static indices_of from(ggml_tensor * ids) {
        ggml_tensor * all = as(ids, GGML_OP_VIEW) ? ids->src[0] : ids;
        if (!all || !dw::is_node_of(all, pool::ready_signature)) {
            return {};
        }
        const size_t at = ids->view_offs - all->view_offs;
        if (ids->ne[0] != all->ne[0] || ids->ne[1] != all->ne[1] || at % all->nb[2] != 0) {
            return {};
        }
        return { all, (int32_t) (at / all->nb[2]) };
    }
};

bool same_indices(ggml_tensor * a, ggml_tensor * b) {
    const indices_of of_a = indices_of::from(a), of_b = indices_of::from(b);
    return a == b || (of_a.all && of_a.all == of_b.all && of_a.plane == of_b.plane);
}

bool are_alike(const ggml_tensor * a, const ggml_tensor * b) {
    return a->type == b->type && ggml_are_same_shape(a, b) && a->buffer && b->buffer &&
           ggml_backend_buffer_get_type(a->buffer) == ggml_backend_buffer_get_type(b->buffer);
}

} // namespace

// The feed-forward half of a layer that ends in a sum.
struct fuser::expert_layer {
    ggml_tensor * sum = nullptr;
    ggml_tensor * x   = nullptr;
    norm          normal;
    routing       chosen;
    ggml_tensor * gate_ids = nullptr; // of gate and up
    ggml_tensor * down_ids = nullptr;
    ggml_tensor * gate = nullptr, *up = nullptr, *down = nullptr;
    ggml_tensor * s_router = nullptr, *s_gate = nullptr, *s_up = nullptr, *s_down = nullptr;
    bool          is_joint = false;

    static expert_layer of(ggml_tensor * sum);
    explicit            operator bool() const { return sum != nullptr; }

  private:
    bool has_types_of_ops() const; // gate's and up's are alike, routers' are float and alike
};

fuser::expert_layer fuser::expert_layer::of(ggml_tensor * sum) {
    expert_layer  found;
    ggml_tensor * both     = as(source(as(sum, GGML_OP_ADD)), GGML_OP_ADD);
    ggml_tensor * routed   = both ? as(summed(both->src[0]), GGML_OP_MUL) : nullptr;
    ggml_tensor * shared   = as(source(both, 1), GGML_OP_MUL);
    ggml_tensor * lowered  = as(source(routed), GGML_OP_MUL_MAT_ID);
    ggml_tensor * s_low    = as(source(shared), GGML_OP_MUL_MAT);
    ggml_tensor * s_router = as(source(as(source(shared, 1), GGML_UNARY_OP_SIGMOID)), GGML_OP_MUL_MAT);
    if (!lowered || !s_low || !s_router || lowered->src[0]->op != GGML_OP_NONE || s_low->src[0]->op != GGML_OP_NONE ||
        s_router->src[0]->op != GGML_OP_NONE) {
        return {};
    }
    ggml_tensor * const h    = s_router->src[1];
    const gated_linear  unit = gated_linear::of(lowered->src[1]), s_unit = gated_linear::of(s_low->src[1]);
    found.x      = source(sum, 1);
    found.normal = norm::of(h);
    found.chosen = routing::of(routed->src[1], h);
    if (found.normal.x != found.x || !found.chosen.router || !unit || !s_unit) {
        return {};
    }
    found.is_joint           = are_halves(unit);
    ggml_tensor * const gate = as(found.is_joint ? unit.gate->src[0] : unit.gate, GGML_OP_MUL_MAT_ID);
    found.gate_ids           = source(gate, 2);
    found.down_ids           = lowered->src[2];
    found.gate               = experts_times(gate, h, found.gate_ids);
    found.up   = found.is_joint ? found.gate : experts_times(unit.up, h, source(as(unit.up, GGML_OP_MUL_MAT_ID), 2));
    found.down = lowered->src[0];
    found.s_router           = s_router->src[0];
    found.s_gate             = weights_times(s_unit.gate, h);
    found.s_up               = weights_times(s_unit.up, h);
    found.s_down             = s_low->src[0];
    const bool is_one_choice = found.is_joint || !found.up || same_indices(unit.up->src[2], found.gate_ids);
    if (!found.gate || !found.up || !found.s_gate || !found.s_up || !is_one_choice || !found.has_types_of_ops()) {
        return {};
    }
    found.sum = sum;
    return found;
}

bool fuser::expert_layer::has_types_of_ops() const {
    return gate->type == up->type && s_gate->type == s_up->type && parts::is_float(chosen.router->type) &&
           s_router->type == chosen.router->type;
}

bool fuser::experts(ggml_tensor * sum) {
    const expert_layer of = expert_layer::of(sum);
    if (!of || !has_few_rows(of.x)) {
        return false;
    }
    const indices_of above = indices_of::from(of.gate_ids), below = indices_of::from(of.down_ids);
    if (above.all && above.all == below.all) {
        return pooled_experts(of, above.all, { (uint8_t) above.plane, (uint8_t) below.plane });
    }
    if (of.gate_ids != of.chosen.ids || of.down_ids != of.chosen.ids || !edit_.is_closed({ sum }, { of.x })) {
        return false;
    }
    namespace op = parts::experts;
    return replace(sum, { of.x },
                   made(op::signature, { sum->ne[0], sum->ne[1], 1, 1 },
                        { { op::x, of.x },
                          { op::norm, of.normal.weights },
                          { op::router, of.chosen.router },
                          { op::gate, of.gate },
                          { op::up, of.up },
                          { op::down, of.down },
                          { op::shared_router, of.s_router },
                          { op::shared_gate, of.s_gate },
                          { op::shared_up, of.s_up },
                          { op::shared_down, of.s_down } },
                        { of.normal.weights, of.chosen.router, of.gate, of.up, of.down, of.s_router, of.s_gate, of.s_up,
                          of.s_down },
                        { of.normal.epsilon, (int32_t) of.chosen.ids->ne[0], of.is_joint ? 1 : 0 }));
}

// The node that guesses the next layer's experts from this one's input; nullptr: there is none that a choice can do.
ggml_tensor * fuser::guess_beside(const expert_layer & of, const ggml_tensor * slots) const {
    const auto * here  = (const pool::layer *) dw::layer_of(slots);
    const auto   users = edit_.users(of.x);
    const auto   found = std::find_if(users.begin(), users.end(), [&](const ggml_tensor * node) {
        return dw::is_node_of(node, pool::guess_signature) && dw::layer_of(node) == here->next;
    });
    if (found == users.end()) {
        return nullptr;
    }
    const ggml_tensor * router = (*found)->src[pool::router];
    const int32_t       n_used = (int32_t) of.chosen.ids->ne[0];
    const bool fits = pool::number_of(*found) == n_used && parts::choice::next_at(n_used) + n_used <= router->ne[1];
    return fits && are_alike(router, of.chosen.router) ? *found : nullptr;
}

// dw_choice for a layer; guess: what guesses the next one's experts, or nullptr
ggml_tensor * fuser::choice_of(const expert_layer & of, const ggml_tensor * guess) {
    namespace op               = parts::choice;
    const ggml_tensor * sorted = of.chosen.sorted;
    parts::settings     with{ of.normal.epsilon, (int32_t) of.chosen.ids->ne[0] };
    with.is_open = 1;
    return made(op::signature, { op::size(sorted->ne[0], sorted->ne[1], of.x->ne[0]), 1, 1, 1 },
                { { op::x, of.x },
                  { op::norm, of.normal.weights },
                  { op::router, of.chosen.router },
                  { op::shared_router, of.s_router },
                  { op::next_norm, guess ? guess->src[pool::norm] : nullptr },
                  { op::next_router, guess ? guess->src[pool::router] : nullptr } },
                { of.normal.weights, of.chosen.router, of.s_router }, with, GGML_TYPE_I32);
}

// dw_chosen_experts for a layer; planes: of indices
ggml_tensor * fuser::networks_of(const expert_layer & of, ggml_tensor * choice, ggml_tensor * indices,
                                 std::array<uint8_t, 2> planes) {
    namespace op = parts::chosen_experts;
    parts::settings with{ of.normal.epsilon, (int32_t) of.chosen.ids->ne[0], of.is_joint ? 1 : 0 };
    with.planes[0] = planes[0];
    with.planes[1] = planes[1];
    with.n_experts = (int32_t) of.chosen.sorted->ne[0];
    return made(op::signature, { of.sum->ne[0], of.sum->ne[1], 1, 1 },
                { { op::x, of.x },
                  { op::norm, of.normal.weights },
                  { op::choice, choice },
                  { op::indices, indices },
                  { op::gate, of.gate },
                  { op::up, of.up },
                  { op::down, of.down },
                  { op::shared_gate, of.s_gate },
                  { op::shared_up, of.s_up },
                  { op::shared_down, of.s_down } },
                { of.normal.weights, of.gate, of.up, of.down, of.s_gate, of.s_up, of.s_down }, with);
}

// Whether these products alone read indices: others would not wait for experts that are on their way.
bool fuser::reads_alone(const expert_layer & of, const ggml_tensor * indices) const {
    const auto reads_experts = [&](const ggml_tensor * node) {
        const ggml_tensor * weights = node->op == GGML_OP_MUL_MAT_ID ? node->src[0] : nullptr;
        return weights && (weights == of.gate || weights == of.up || weights == of.down);
    };
    const auto users = edit_.users(indices);
    return std::all_of(users.begin(), users.end(), [&](const ggml_tensor * node) {
        const auto of_view = edit_.users(node);
        return reads_experts(node) ||
               (node->op == GGML_OP_VIEW && std::all_of(of_view.begin(), of_view.end(), reads_experts));
    });
}

// The sorted experts, whose first ones the pool's op reads, become a view of the choice. The pool's op makes the choice
// whole, and fetches what it guesses.
bool fuser::pooled_experts(const expert_layer & of, ggml_tensor * indices, std::array<uint8_t, 2> planes) {
    ggml_tensor *const sorted = of.chosen.sorted, *const sum = of.sum, *const slots = indices->src[pool::indices];
    ggml_tensor * const        guess = guess_beside(of, slots);
    const int32_t              next  = parts::choice::next_at((int32_t) of.chosen.ids->ne[0]);
    const std::vector          ended = guess ? std::vector{ guess } : std::vector<ggml_tensor *>{};
    std::vector<ggml_tensor *> results{ sorted, sum };
    results.insert(results.end(), ended.begin(), ended.end());
    if (indices->src[pool::choice] != of.chosen.ids || !edit_.is_closed(results, { of.x, indices, of.chosen.ids }) ||
        edit_.is_held(sorted) || edit_.users(sorted).size() != 1 || // other readers would see weights
        sorted->ne[0] < next || !reads_alone(of, indices)) {
        return false;
    }
    ggml_tensor * choice   = choice_of(of, guess);
    ggml_tensor * networks = choice ? networks_of(of, choice, indices, planes) : nullptr;
    if (!networks) {
        return false;
    }
    ggml_tensor choosing = *slots;
    pool::set(&choosing, pool::chooses);
    if (guess) {
        choosing.src[pool::guesses] = sorted;
        pool::set_blocks(&choosing, parts::blocks_of_row(of.down->ne[0], sum->ne[0], of.chosen.ids->ne[0]));
        pool::set_number(&choosing, next);
        count(fused_guesses, true);
    }
    edit_.replace(slots, {}, { of.chosen.ids }, &choosing);
    return split({ sorted }, { of.x }, choice, ended) &&
           replace(sum, { of.x, indices, of.chosen.ids, sorted }, networks);
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
    if (!gate || !up || gate->type != up->type || !edit_.is_closed({ sum }, { x })) {
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
