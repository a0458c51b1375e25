// The feed-forward half of a dense layer on CUDA: layer-parts.h. Three kernels: norm, gate and up, down.

#include "ops/layer-parts/dense-hidden.cuh"
#include "ops/layer-parts/product-list.cuh"

namespace {

using namespace dw::layer_parts;
namespace of = dw::layer_parts::feed_forward;

struct layout {
    size_t hidden, end;

    explicit layout(const ggml_tensor * dst) :
        hidden((activations::bytes(dst->ne[1], dst->ne[0]) + 127) / 128 * 128),
        end(hidden + activations::bytes(dst->ne[1], dst->src[of::down]->ne[0])) {}
};

size_t workspace(const ggml_tensor * dst) {
    return layout(dst).end;
}

bool takes(const ggml_tensor * dst) {
    const auto *        src   = dst->src;
    const ggml_tensor * x     = src[of::x];
    const int64_t       width = dst->ne[0], n_hidden = src[of::down]->ne[0];
    return is_rows(x, dst->ne[1]) && is_rows(dst, x->ne[1]) && width == x->ne[0] && width <= max_width &&
           n_hidden % 32 == 0 && is_vector(src[of::norm], width) && is_weights(src[of::gate], width) &&
           is_weights(src[of::up], width) && is_weights(src[of::down], n_hidden) &&
           src[of::gate]->type == src[of::up]->type && src[of::gate]->ne[1] == n_hidden &&
           src[of::up]->ne[1] == n_hidden && src[of::down]->ne[1] == width;
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const auto *                     src      = dst->src;
    const ggml_tensor *              x        = src[of::x];
    const int                        n        = (int) dst->ne[1];
    const int64_t                    n_hidden = src[of::down]->ne[0];
    char *                           memory   = (char *) with.workspace;
    const activations                h        = activations::in(memory, n, dst->ne[0]);
    const activations                hidden   = activations::in(memory + layout(dst).hidden, n, n_hidden);
    const dw::layer_parts::arguments a        = {
        {},
        { matrix::from(src[of::gate]), matrix::from(src[of::up]), matrix::from(src[of::down]), 0, (int) n_hidden },
        nullptr,
        {},
        0,
        nullptr,
        h,
        hidden,
        n,
        0
    };
    launch_input(normalised_rows(x, src[of::norm], settings_of(dst).epsilon), h, n, with.stream);
    if (!launch_dense_hidden(a, with.stream)) {
        launch_hidden(a, 0, with.stream);
    }
    add_product(with, dst, src[of::down], x, hidden);
}

} // namespace

const dw::op_descriptor dw::layer_parts::feed_forward::on_cuda = { of::signature, nullptr, takes, workspace, launch };
