// The feed-forward half of a layer with experts on CUDA: layer-parts.h. Four kernels: router and norm, choice, gate and
// up, down; of one row the last two choose for themselves. Of a batch each expert that a row chose is read once. A
// kernel starts while the one before it ends.

#include "ops/door/node.h"
#include "ops/expert-slots/copy-streams.h"
#include "ops/layer-parts/group-strips.cuh"
#include "ops/layer-parts/inputs.cuh"
#include "ops/layer-parts/router.cuh"

namespace {

using namespace dw::layer_parts;

// Operands that both ops with networks have.
struct operands {
    const ggml_tensor *x, *norm, *gate, *up, *down, *shared_gate, *shared_up, *shared_down;

    // of: the op's enum
    template <typename of> static operands from(const ggml_tensor * dst) {
        const auto * src = dst->src;
        return { src[of::x],    src[of::norm],        src[of::gate],      src[of::up],
                 src[of::down], src[of::shared_gate], src[of::shared_up], src[of::shared_down] };
    }
};

// of rows that hold either network's; a multiple of what loads of 16 bytes need
int64_t width_of_hidden(const operands & of) {
    return GGML_PAD(std::max(of.down->ne[0], of.shared_down->ne[0]), 64);
}

// Where things lie in the workspace.
struct layout {
    size_t logits = 0, h = 0, hidden = 0, chosen = 0, places = 0, end = 0;

    size_t next(size_t bytes) {
        const size_t begin = end;
        end += (bytes + 127) / 128 * 128;
        return begin;
    }
    void add_logits(int64_t n, int64_t n_experts) { logits = next((size_t) (n * (n_experts + 1)) * sizeof(float)); }
    void add_h(int64_t n, int64_t width) { h = next(activations::bytes(n, width)); }
    void add_networks(int64_t n, int32_t n_used, const operands & of) {
        hidden = next(activations::bytes(n * (n_used + 1), width_of_hidden(of)));
        chosen = next(sizeof(routes));
    }
    void add_places(int32_t n_used) { places = next(2 * n_used * sizeof(int32_t)); }
};

bool is_weights(const ggml_tensor * t, int64_t width, int64_t n_rows, int64_t n_experts) {
    return is_product_type(t->type) && t->ne[0] == width && t->ne[1] >= n_rows && t->ne[2] == n_experts &&
           is_product_width(t->type, width) && (is_float(t->type) || dw::ptx::has_products()) &&
           (uintptr_t) t->data % 16 == 0 && t->nb[1] == ggml_row_size(t->type, width) &&
           t->nb[2] == t->nb[1] * (size_t) t->ne[1];
}

bool are_rows(const ggml_tensor * x, const ggml_tensor * norm, int64_t n_experts, int32_t n_used) {
    const int64_t width = x->ne[0], n = x->ne[1];
    return dw::is_f32(x) && x->nb[1] % 16 == 0 && width % 32 == 0 && width <= max_width && n >= 1 && n <= max_rows &&
           x->ne[2] == 1 && x->ne[3] == 1 && dw::is_f32(norm) && ggml_nelements(norm) == width &&
           n_experts <= max_experts && n_used >= 1 && n_used <= max_used && n_used <= n_experts;
}

bool is_routed(const ggml_tensor * router, const ggml_tensor * shared_router, int64_t width) {
    return is_float(router->type) && router->ne[0] == width && ggml_is_contiguous(router) &&
           shared_router->ne[0] == width && shared_router->type == router->type &&
           ggml_nelements(shared_router) == width;
}

// n_above, n_below: experts' places in gate and up, and in down
bool are_networks(const ggml_tensor * dst, const operands & of, int64_t n_above, int64_t n_below) {
    const int64_t width = dst->ne[0], n_hidden = of.down->ne[0], n_shared = of.shared_down->ne[0];
    return n_hidden % 32 == 0 && n_shared % 32 == 0 && ggml_are_same_shape(of.x, dst) && dw::is_f32(dst) &&
           dst->nb[1] % 4 == 0 && is_weights(of.gate, width, n_hidden * (settings_of(dst).is_joint ? 2 : 1), n_above) &&
           is_weights(of.up, width, n_hidden, n_above) && of.up->type == of.gate->type &&
           is_weights(of.down, n_hidden, width, n_below) && is_weights(of.shared_gate, width, n_shared, 1) &&
           is_weights(of.shared_up, width, n_shared, 1) && of.shared_up->type == of.shared_gate->type &&
           is_weights(of.shared_down, n_shared, width, 1);
}

// What a router's kernel is given; next: of the layer that follows, nullptr without.
struct routers {
    const ggml_tensor *x, *norm, *router, *shared_router;
    const ggml_tensor *next_norm = nullptr, *next_router = nullptr;

    int64_t n_experts() const { return router->ne[1]; }
    // of experts, the shared one among them
    int64_t n_blocks() const { return n_experts() + 1 + (next_router ? n_experts() : 0); }
};

template <ggml_type type>
void launch_router_of(const routers & of, float epsilon, float * logits, const activations & h, cudaStream_t stream) {
    constexpr int        at_once = 2, most = most_threads / at_once; // two blocks a multiprocessor
    const int            n = (int) of.x->ne[1], n_threads = threads_for(of.x->ne[0]);
    const bool           has_teams = n > at_once && n_threads <= most;
    const int            n_teams   = has_teams ? std::min((n + at_once - 1) / at_once, most / n_threads) : 1;
    const router_weights own       = { dw::data_of<const float>(of.norm), of.router->data, of.shared_router->data };
    const router_weights next =
        of.next_router ? router_weights{ dw::data_of<const float>(of.next_norm), of.next_router->data, nullptr }
                       : router_weights{};
    ggml_cuda_kernel_launch(has_teams ? route<type, at_once> : route<type, 1>,
                            { dim3((unsigned) of.n_blocks()), dim3(n_threads * n_teams), 0, stream },
                            dw::data_of<const float>(of.x), dw::stride_of(of.x, 1), n, own, next, (int) of.n_experts(),
                            epsilon, n_teams, logits, h);
}

void launch_router(const routers & of, float epsilon, float * logits, const activations & h, cudaStream_t stream) {
    switch (of.router->type) {
        case GGML_TYPE_F32:
            return launch_router_of<GGML_TYPE_F32>(of, epsilon, logits, h, stream);
        case GGML_TYPE_F16:
            return launch_router_of<GGML_TYPE_F16>(of, epsilon, logits, h, stream);
        default:
            return launch_router_of<GGML_TYPE_BF16>(of, epsilon, logits, h, stream);
    }
}

arguments arguments_of(const ggml_tensor * dst, const operands & of, char * memory, const layout & at) {
    const settings to       = settings_of(dst);
    const int64_t  n_hidden = of.down->ne[0], n_shared = of.shared_down->ne[0];
    const int      n = (int) dst->ne[1];
    arguments      a = {};
    a.routed = { matrix::from(of.gate), matrix::from(of.up), matrix::from(of.down), to.is_joint ? (int) n_hidden : 0,
                 (int) n_hidden };
    a.shared = { matrix::from(of.shared_gate), matrix::from(of.shared_up), matrix::from(of.shared_down), 0,
                 (int) n_shared };
    a.chosen = (routes *) (memory + at.chosen);
    a.h      = activations::in(memory + at.h, n, dst->ne[0]);
    a.hidden = activations::in(memory + at.hidden, n * (to.n_used + 1), width_of_hidden(of));
    a.n      = n;
    a.n_used = to.n_used;
    return a;
}

void launch_choice(const arguments & a, const float * logits, cudaStream_t stream) {
    if (a.n > 1) {
        ggml_cuda_kernel_launch(choose, { dim3(1), dim3(32 * (a.n + a.before.looks)), 0, stream }, logits, a.before,
                                a.n_experts, a.n_used, a.chosen);
    }
}

namespace whole {

namespace of = dw::layer_parts::experts;

layout layout_of(const ggml_tensor * dst) {
    layout at;
    at.add_logits(dst->ne[1], dst->src[of::router]->ne[1]);
    at.add_h(dst->ne[1], dst->ne[0]);
    at.add_networks(dst->ne[1], settings_of(dst).n_used, operands::from<of::src>(dst));
    return at;
}

size_t workspace(const ggml_tensor * dst) {
    return layout_of(dst).end;
}

bool takes(const ggml_tensor * dst) {
    const auto *  src       = dst->src;
    const int64_t n_experts = src[of::router]->ne[1];
    return are_rows(src[of::x], src[of::norm], n_experts, settings_of(dst).n_used) &&
           is_routed(src[of::router], src[of::shared_router], dst->ne[0]) &&
           are_networks(dst, operands::from<of::src>(dst), n_experts, n_experts);
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const auto *  src    = dst->src;
    const layout  at     = layout_of(dst);
    char *        memory = (char *) with.workspace;
    float * const logits = (float *) (memory + at.logits);
    arguments     a      = arguments_of(dst, operands::from<of::src>(dst), memory, at);
    a.n_experts          = (int) src[of::router]->ne[1];
    a.logits             = a.n == 1 ? logits : nullptr;
    launch_router({ src[of::x], src[of::norm], src[of::router], src[of::shared_router] }, settings_of(dst).epsilon,
                  logits, a.h, with.stream);
    launch_choice(a, logits, with.stream);
    launch_gated(a, with.stream);
    launch_lowered(a, src[of::x], dst, with.stream);
}

} // namespace whole

namespace choice_alone {

namespace of = dw::layer_parts::choice;

// the layer that follows, if the node has it
bool is_next_routed(const ggml_tensor * dst) {
    const ggml_tensor *norm = dst->src[of::next_norm], *router = dst->src[of::next_router];
    if (!norm || !router) {
        return norm == router;
    }
    const ggml_tensor * own    = dst->src[of::router];
    const int32_t       n_used = settings_of(dst).n_used;
    return dw::is_f32(norm) && ggml_nelements(norm) == dst->src[of::x]->ne[0] && router->type == own->type &&
           ggml_are_same_shape(router, own) && ggml_is_contiguous(router) && own->ne[1] >= of::next_at(n_used) + n_used;
}

bool takes(const ggml_tensor * dst) {
    const auto *  src    = dst->src;
    const int32_t n_used = settings_of(dst).n_used;
    const int64_t width = src[of::x]->ne[0], n = src[of::x]->ne[1], n_experts = src[of::router]->ne[1];
    const size_t  n_bytes = of::h_at(n_experts, n) * sizeof(int32_t) + activations::bytes(n, width);
    return are_rows(src[of::x], src[of::norm], n_experts, n_used) &&
           is_routed(src[of::router], src[of::shared_router], width) && dw::is_i32(dst) && ggml_is_contiguous(dst) &&
           ggml_nbytes(dst) >= n_bytes && n_experts >= of::next_at(n_used) && is_next_routed(dst);
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const auto *      src       = dst->src;
    const settings    to        = settings_of(dst);
    const int         n         = (int) src[of::x]->ne[1];
    const int64_t     n_experts = src[of::router]->ne[1];
    int32_t * const   out       = dw::data_of<int32_t>(dst);
    float * const     logits    = (float *) (out + of::logits_at(n_experts, n));
    const activations h         = activations::in((char *) (out + of::h_at(n_experts, n)), n, src[of::x]->ne[0]);
    launch_router({ src[of::x], src[of::norm], src[of::router], src[of::shared_router], src[of::next_norm],
                    src[of::next_router] },
                  to.epsilon, logits, h, with.stream);
    if (!to.is_open) { // in tests, which compare the two
        ggml_cuda_kernel_launch(write_choice, { dim3(src[of::next_router] ? 2 : 1), dim3(32 * n), 0, with.stream },
                                (const float *) logits, (int) n_experts, to.n_used, out, n_experts,
                                (int) of::next_at(to.n_used));
    }
}

} // namespace choice_alone

namespace networks_alone {

namespace slots = dw::expert_slots;

namespace of = dw::layer_parts::chosen_experts;

layout layout_of(const ggml_tensor * dst) {
    layout at;
    at.add_networks(dst->ne[1], settings_of(dst).n_used, operands::from<of::src>(dst));
    at.add_places(settings_of(dst).n_used);
    return at;
}

size_t workspace(const ggml_tensor * dst) {
    return layout_of(dst).end;
}

bool takes(const ggml_tensor * dst) {
    const auto *        src     = dst->src;
    const settings      to      = settings_of(dst);
    const ggml_tensor * chosen  = src[of::choice];
    const ggml_tensor * indices = src[of::indices];
    return are_rows(src[of::x], src[of::norm], to.n_experts, to.n_used) && dw::is_i32(chosen) &&
           ggml_is_contiguous(chosen) && to.n_experts >= choice::next_at(to.n_used) &&
           ggml_nelements(chosen) >= choice::size(to.n_experts, dst->ne[1], dst->ne[0]) && dw::is_i32(indices) &&
           indices->ne[0] == to.n_used && indices->ne[1] == dst->ne[1] &&
           indices->ne[2] > std::max(to.planes[0], to.planes[1]) &&
           are_networks(dst, operands::from<of::src>(dst), src[of::gate]->ne[2], src[of::down]->ne[2]);
}

// The pool's layer whose experts may be on their way; nullptr: there is none.
const slots::layer * awaited_by(const ggml_tensor * indices) {
    const ggml_tensor * node = dw::is_node_of(indices, slots::ready_signature) ? indices->src[slots::indices] : nullptr;
    return node && slots::guessed_by(node) ? (const slots::layer *) dw::layer_of(node) : nullptr;
}

// What dw_choice and the pool's op say of rows. places: i32[2][k] in the workspace.
void set_chosen_before(arguments & a, const ggml_tensor * dst, int32_t * places, cudaStream_t stream) {
    const settings       to      = settings_of(dst);
    const ggml_tensor *  indices = dst->src[of::indices], *down = dst->src[of::down];
    const slots::layer * awaited = awaited_by(indices);
    const int32_t *      chosen  = dw::data_of<const int32_t>(dst->src[of::choice]);
    a.before                     = { chosen, to.n_experts, {}, {}, false };
    for (const int side : { 0, 1 }) {
        a.before.places[side] = (const int32_t *) ((const char *) indices->data + to.planes[side] * indices->nb[2]);
        if (awaited) {
            a.before.waits[side] = slots::awaited::of(*awaited, down->data, side == 1, to.planes[side]);
            GGML_ASSERT(a.before.waits[side].parts != 0 && "the weights are the pool's");
        }
    }
    const bool has_room = a.n > 1 || has_second_team(a, n_groups_of(a)); // for what runs beside gate and up
    if (awaited && has_room && awaited->copies->found == awaited) {
        a.before.looks = true;
        a.logits       = (const float *) (chosen + choice::logits_at(to.n_experts, a.n));
    } else if (awaited) {
        slots::join_found(*awaited->copies, stream);
    }
    if (awaited && !has_room) {
        ggml_cuda_kernel_launch(await_all, { dim3(1), dim3(32), 0, stream }, a.before, a.n_used, places);
        a.before = { a.before.choice, a.before.stride, { places, places + a.n_used }, {}, false };
    }
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const auto *    src    = dst->src;
    const settings  to     = settings_of(dst);
    const layout    at     = layout_of(dst);
    char * const    memory = (char *) with.workspace;
    const int32_t * chosen = dw::data_of<const int32_t>(src[of::choice]);
    arguments       a      = arguments_of(dst, operands::from<of::src>(dst), memory, at);
    a.n_experts            = to.n_experts;
    a.h                    = activations::in((char *) (chosen + choice::h_at(to.n_experts, a.n)), a.n, dst->ne[0]);
    set_chosen_before(a, dst, (int32_t *) (memory + at.places), with.stream);
    launch_choice(a, a.logits, with.stream);
    launch_gated(a, with.stream);
    launch_lowered(a, src[of::x], dst, with.stream);
    if (a.before.looks) { // before down, an edge of the graph would let it start late
        slots::join_found(*awaited_by(src[of::indices])->copies, with.stream);
    }
}

} // namespace networks_alone

} // namespace

namespace dw::layer_parts {
const op_descriptor experts::on_cuda = { experts::signature, nullptr, whole::takes, whole::workspace, whole::launch };
const op_descriptor choice::on_cuda  = { choice::signature, nullptr, choice_alone::takes, nullptr,
                                         choice_alone::launch };
const op_descriptor chosen_experts::on_cuda = { chosen_experts::signature, nullptr, networks_alone::takes,
                                                networks_alone::workspace, networks_alone::launch };
} // namespace dw::layer_parts
