// Convolutions, states and the delta rule of gated-delta-net layers in llama.cpp's graphs: see fuser.h.

#include "decode/fuser.h"
#include "decode/pattern.h"
#include "ops/tree-delta-net/tree-ops.h"

#include <cmath>
#include <cstring>

namespace draftwood {

namespace {

// A recurrent state that a graph for one sequence reads, and the copy that puts a new one in place of it.
struct state_use {
    ggml_tensor * states = nullptr; // [size of a state, n_cells]
    ggml_tensor * cells  = nullptr;
    ggml_tensor * copy   = nullptr;
    ggml_tensor * target = nullptr;

    // read: what the graph works on; the new state is the part of `updated_in` from byte `first` on
    static state_use of(ggml_tensor * read, ggml_tensor * updated_in, size_t first, const graph_edit & edit) {
        ggml_tensor * rows = as(plain(read), GGML_OP_GET_ROWS);
        if (!rows || ggml_nelements(rows) != rows->src[0]->ne[0] || !is_only_input(rows->src[1])) {
            return {};
        }
        for (ggml_tensor * part : edit.users(updated_in)) {
            const auto    users = edit.users(part);
            ggml_tensor * copy  = as(part, GGML_OP_VIEW) && users.size() == 1 ? as(users[0], GGML_OP_CPY) : nullptr;
            if (copy && edit.users(copy).empty() && part->view_offs == first &&
                is_cell_of(rows->src[0], copy->src[1])) {
                return { rows->src[0], rows->src[1], copy, copy->src[1] };
            }
        }
        return {};
    }
    explicit operator bool() const { return copy != nullptr; }

  private:
    // the cells of a batch, of which there is one
    static bool is_only_input(ggml_tensor * cells) { return is_input(cells) && owner_of(cells)->ne[0] == 1; }
    static bool is_cell_of(ggml_tensor * states, ggml_tensor * target) {
        return owner_of(states) == owner_of(target) && target->type == GGML_TYPE_F32 && ggml_is_contiguous(target) &&
               ggml_nelements(target) == states->ne[0] && target->view_offs % states->nb[1] == 0;
    }
};

// What a convolution becomes: queries and keys normalised by head, and values.
struct heads {
    std::vector<ggml_tensor *> results; // q, k, v; none: it becomes something else
    float                      epsilon = 0.0f;
    int64_t                    size = 0, n_keys = 0;

    static heads of(ggml_tensor * convolved, const graph_edit & edit) {
        ggml_tensor * silu = as(edit.only_user(as(convolved, GGML_OP_SSM_CONV)), GGML_UNARY_OP_SILU);
        if (!silu || edit.users(silu).size() != 3) {
            return {};
        }
        ggml_tensor *const q = edit.users(silu)[0], *k = edit.users(silu)[1], *v = edit.users(silu)[2];
        heads              found{ {}, 0.0f, q->ne[0], q->ne[1] };
        const size_t       bytes = (size_t) (found.n_keys * found.size) * sizeof(float); // of q, of a row
        if ((2 * found.n_keys + v->ne[1]) * found.size != silu->ne[0]) {
            return {};
        }
        for (ggml_tensor * part : { q, k, v }) {
            if (!as(part, GGML_OP_VIEW) || part->ne[0] != found.size || part->nb[1] != found.size * sizeof(float) ||
                part->nb[2] != silu->nb[1] || part->view_offs != found.results.size() * bytes) {
                return {};
            }
            found.results.push_back(part == v ? v : found.normalised(part, edit));
        }
        const bool is_whole = found.results[0] && found.results[1] && k->ne[1] == found.n_keys;
        return is_whole ? found : heads{};
    }
    explicit operator bool() const { return !results.empty(); }

  private:
    // rms_norm(part) / sqrt(size)
    ggml_tensor * normalised(const ggml_tensor * part, const graph_edit & edit) {
        ggml_tensor * normal = as(edit.only_user(part), GGML_OP_RMS_NORM);
        ggml_tensor * scaled = as(edit.only_user(normal), GGML_OP_SCALE);
        float         scale  = 0.0f;
        if (scaled) {
            std::memcpy(&epsilon, normal->op_params, sizeof(epsilon));
            std::memcpy(&scale, scaled->op_params, sizeof(scale));
        }
        return scale == 1.0f / sqrtf((float) size) ? scaled : nullptr;
    }
};

} // namespace

bool fuser::delta_front(ggml_tensor * convolved) {
    const heads   found  = heads::of(convolved, edit_);
    ggml_tensor * joined = found ? as(convolved->src[0], GGML_OP_CONCAT) : nullptr;
    ggml_tensor * x      = source(as(source(joined, 1), GGML_OP_TRANSPOSE));
    if (!x || joined->ne[2] != 1 || joined->op_params[0] != 0 || x->ne[1] > parts::max_rows) {
        return false;
    }
    ggml_tensor *   kernel = convolved->src[1];
    const state_use state  = state_use::of(joined->src[0], joined, (size_t) x->ne[1] * sizeof(float), edit_);
    const std::vector<const ggml_tensor *> inputs{ x, state.states, state.cells, state.target, kernel };
    std::vector<ggml_tensor *>             ends(found.results);
    ends.push_back(state.copy);
    if (!state || !edit_.is_closed(ends, inputs)) {
        return false;
    }
    namespace op = parts::delta_front;
    ggml_tensor * node =
        made(op::signature, { ggml_nelements(convolved), 1, 1, 1 },
             { { op::x, x },
               { op::states, state.states },
               { op::cells, state.cells },
               { op::target, state.target },
               { op::kernel, kernel } },
             { kernel, owner_of(state.states) }, { found.epsilon, 0, 0, (int32_t) found.size, (int32_t) found.n_keys });
    return split(found.results, inputs, node, { state.copy });
}

// In a verify the convolution's windows are an op of ours, behind a copy of its inputs for the commit.
bool fuser::delta_tree(ggml_tensor * convolved) {
    namespace from        = dw::tree_conv_windows;
    const heads   found   = heads::of(convolved, edit_);
    ggml_tensor * windows = found ? convolved->src[0] : nullptr;
    if (!windows || !dw::is_node_of(windows, from::signature) || windows->ne[2] > parts::max_rows) {
        return false;
    }
    ggml_tensor * copy = as(windows->src[from::x], GGML_OP_CPY);
    ggml_tensor * x    = plain(source(copy));
    if (!x || x->type != GGML_TYPE_F32 || copy->src[1]->type != GGML_TYPE_F32) {
        return false;
    }
    ggml_tensor *const kept = copy->src[1], *kernel = convolved->src[1], *tree = windows->src[from::tree],
                       *states = windows->src[from::states], *cells = windows->src[from::cells];
    const std::vector<const ggml_tensor *> inputs{ x, states, cells, tree, kept, kernel };
    if (!edit_.is_closed(found.results, inputs)) {
        return false;
    }
    namespace op = parts::delta_tree;
    ggml_tensor * node =
        made(op::signature, { ggml_nelements(convolved), 1, 1, 1 },
             { { op::x, x },
               { op::states, states },
               { op::cells, cells },
               { op::tree, tree },
               { op::kept, kept },
               { op::kernel, kernel } },
             { kernel, owner_of(states) }, { found.epsilon, 0, 0, (int32_t) found.size, (int32_t) found.n_keys });
    return split(found.results, inputs, node);
}

bool fuser::delta_heads(ggml_tensor * convolved) {
    const heads found = heads::of(convolved, edit_);
    if (!found || found.results[0]->ne[2] * found.results[0]->ne[3] > parts::max_rows) {
        return false;
    }
    ggml_tensor *windows = convolved->src[0], *kernel = convolved->src[1];
    if (!edit_.is_closed(found.results, { windows, kernel })) {
        return false;
    }
    namespace op       = parts::delta_heads;
    ggml_tensor * node = made(op::signature, { ggml_nelements(convolved), 1, 1, 1 },
                              { { op::windows, windows }, { op::kernel, kernel } }, { kernel },
                              { found.epsilon, 0, 0, (int32_t) found.size, (int32_t) found.n_keys });
    return split(found.results, { windows, kernel }, node);
}

namespace {

// The kernel of the convolution that queries come from: it says where a layer is computed.
ggml_tensor * kernel_of(ggml_tensor * q) {
    ggml_tensor * part = as(source(as(source(as(q, GGML_OP_SCALE)), GGML_OP_RMS_NORM)), GGML_OP_VIEW);
    return source(as(source(as(source(part), GGML_UNARY_OP_SILU)), GGML_OP_SSM_CONV), 1);
}

// What the heads that a delta rule gives are gated with: rms_norm(y) * weights * silu(z).
struct head_gate {
    ggml_tensor *weights = nullptr, *z = nullptr;

    // of y, whose z must be computed with `beta`: the graph has it behind y; for weights that are quantised
    static head_gate of(ggml_tensor * y, ggml_tensor * beta, const graph_edit & edit) {
        ggml_tensor * shaped = edit.only_user(y);
        ggml_tensor * inner  = as(as(shaped, GGML_OP_RESHAPE) ? edit.only_user(shaped) : shaped, GGML_OP_RMS_NORM);
        ggml_tensor * scaled = edit.only_user(inner);
        const norm    normal = norm::of(scaled);
        ggml_tensor * gated  = as(edit.only_user(scaled), GGML_OP_MUL);
        ggml_tensor * z      = source(as(source(gated, 1), GGML_UNARY_OP_SILU));
        ggml_tensor * row    = edit.only_user(gated);
        ggml_tensor * out    = as(as(row, GGML_OP_RESHAPE) ? edit.only_user(row) : row, GGML_OP_MUL_MAT);
        const auto *  array  = edit.array_of(plain(z));
        if (!normal || !ggml_is_contiguous(normal.weights) || ggml_nelements(normal.weights) != inner->ne[0] ||
            !array || array != edit.array_of(plain(beta)) || !ggml_is_contiguous(z) ||
            ggml_nelements(z) != ggml_nelements(y) || !out || !is_quantised(out->src[0]) ||
            parts::is_byte_tiled(out->src[0]->type)) { // whose rows a kernel of their own makes
            return {};
        }
        return { normal.weights, z };
    }
    explicit operator bool() const { return z != nullptr; }
};

} // namespace

bool fuser::delta_step(ggml_tensor * rule) {
    const auto users = edit_.users(as(rule, GGML_OP_GATED_DELTA_NET));
    if (users.size() != 2 || rule->op_params[0] != 1) {
        return false;
    }
    ggml_tensor * const * src   = rule->src; // q, k, v, g, beta, state
    ggml_tensor *         v     = src[2];
    const state_use       state = state_use::of(src[5], rule, ggml_nelements(v) * sizeof(float), edit_);
    ggml_tensor *         out   = state && users[0] == state.copy->src[0] ? users[1] : users[0];
    if (!state || !as(out, GGML_OP_VIEW) || out->view_offs != 0 || !ggml_is_contiguous(out) || edit_.is_held(out) ||
        ggml_nelements(out) != ggml_nelements(v) || v->ne[2] > parts::max_rows || src[3]->ne[0] != 1) {
        return false;
    }
    const std::vector<const ggml_tensor *> inputs{ src[0], src[1],       v,           src[3],
                                                   src[4], state.states, state.cells, state.target };
    if (!edit_.is_closed({ out, state.copy }, inputs)) {
        return false;
    }
    namespace op        = parts::delta_step;
    const int64_t n     = ggml_nelements(out);
    const auto    gated = [&](const head_gate & gate) {
        return made(op::signature, { gate ? n + op::n_gated(n) : n, 1, 1, 1 },
                       { { op::q, src[0] },
                      { op::k, src[1] },
                      { op::v, v },
                      { op::g, src[3] },
                      { op::beta, src[4] },
                      { op::states, state.states },
                      { op::cells, state.cells },
                      { op::target, state.target },
                      { op::z, gate.z },
                      { op::norm, gate.weights } },
                       { kernel_of(src[0]), owner_of(state.states), gate ? gate.weights : kernel_of(src[0]) }, {});
    };
    head_gate     gate = v->ne[2] == 1 ? head_gate::of(out, src[4], edit_) : head_gate{};
    ggml_tensor * node = gated(gate);
    if (!node && gate) { // weights of the gate may be on another device
        gate = {};
        node = gated(gate);
    }
    const bool is_new = split({ out }, inputs, node, { state.copy });
    if (is_new && gate) {
        ahead_[out] = node;
        count(fused_gates, true);
    }
    return is_new;
}

} // namespace draftwood
