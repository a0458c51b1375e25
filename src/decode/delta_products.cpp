// The products of gated-delta-net layers in llama.cpp's graphs, with a layer's input and with gated heads: see fuser.h.

#include "decode/fuser.h"
#include "decode/pattern.h"

namespace draftwood {

namespace {

// sigmoid(weights h)
ggml_tensor * sigmoid_of(ggml_tensor * product, const graph_edit & edit) {
    ggml_tensor * shaped = edit.only_user(product);
    return as(as(shaped, GGML_OP_RESHAPE) ? edit.only_user(shaped) : shaped, GGML_UNARY_OP_SIGMOID);
}

// softplus(weights h + dt) * a
ggml_tensor * decay_of(ggml_tensor * product, const graph_edit & edit) {
    ggml_tensor * shaped   = edit.only_user(product);
    ggml_tensor * biased   = as(as(shaped, GGML_OP_RESHAPE) ? edit.only_user(shaped) : shaped, GGML_OP_ADD);
    ggml_tensor * softplus = as(edit.only_user(biased), GGML_UNARY_OP_SOFTPLUS);
    ggml_tensor * decay    = as(edit.only_user(softplus), GGML_OP_MUL);
    return decay && decay->src[0] == softplus ? decay : nullptr;
}

// The four products with a layer's input, and what two of them become.
struct delta_products {
    ggml_tensor *qkv = nullptr, *z = nullptr;
    ggml_tensor *beta = nullptr, *w_beta = nullptr;   // sigmoid_of()
    ggml_tensor *decay = nullptr, *w_alpha = nullptr; // decay_of()

    static delta_products of(ggml_tensor * input, const graph_edit & edit) {
        const auto users = edit.users(input);
        if (users.size() != 4) {
            return {};
        }
        delta_products found;
        for (ggml_tensor * product : users) {
            ggml_tensor * weights = weights_times(product, input);
            if (!weights) {
                return {};
            }
            if (ggml_tensor * sigmoid = sigmoid_of(product, edit)) {
                found.beta   = sigmoid;
                found.w_beta = weights;
            } else if (ggml_tensor * decay = decay_of(product, edit)) {
                found.decay   = decay;
                found.w_alpha = weights;
            } else {
                (found.qkv ? found.z : found.qkv) = product;
            }
        }
        return found;
    }
    explicit operator bool() const { return qkv && z && beta && decay; }
};

} // namespace

bool fuser::delta_inputs(ggml_tensor * scaled) {
    const norm           normal = norm::of(scaled);
    const delta_products found  = delta_products::of(scaled, edit_);
    if (!normal || !found || !has_few_rows(normal.x)) {
        return false;
    }
    const auto [qkv, z, beta, w_beta, decay, w_alpha] = found;
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
    return split(results, { normal.x }, node);
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
    namespace op     = parts::delta_output;
    const auto ahead = ahead_.find(plain(y));
    return replace(sum, { y, z, residual },
                   made(op::signature, { sum->ne[0], sum->ne[1], 1, 1 },
                        { { op::y, y },
                          { op::z, z },
                          { op::norm, normal.weights },
                          { op::weights, weights },
                          { op::residual, residual },
                          { op::gated, ahead == ahead_.end() ? nullptr : ahead->second } },
                        { normal.weights, weights }, { normal.epsilon, 0, 0 }));
}

} // namespace draftwood
