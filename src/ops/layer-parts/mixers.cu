// Begin and end of a delta-net or attention layer on CUDA: layer-parts.h. A kernel each, or two: the
// activations, then all products.

#include "ops/layer-parts/product-list.cuh"

namespace {

using namespace dw::layer_parts;

namespace inputs {

// weights: operands [first, first + n)
bool takes(const ggml_tensor * dst, int first, int n) {
    const ggml_tensor * x  = dst->src[0];
    bool                ok = is_rows(x, x->ne[1]) && x->ne[0] <= max_width && is_vector(dst->src[1], x->ne[0]);
    for (int i = first; i < first + n; ++i) {
        ok = ok && is_weights(dst->src[i], x->ne[0]);
    }
    return ok && dw::is_f32(dst) && ggml_is_contiguous(dst);
}

size_t workspace(const ggml_tensor * dst) {
    return activations::bytes(dst->src[0]->ne[1], dst->src[0]->ne[0]);
}

void launch(const dw::launch_context & with, const ggml_tensor * dst, product_list & list) {
    const ggml_tensor * x = dst->src[0];
    list.launch(normalised_rows(x, dst->src[1], settings_of(dst).epsilon), with.workspace, (int) x->ne[1], with.stream);
}

} // namespace inputs

namespace delta_in {

namespace of = delta_inputs;

bool takes(const ggml_tensor * dst) {
    static_assert(of::z == of::qkv + 1 && of::beta == of::qkv + 2 && of::alpha == of::qkv + 3, "side by side");
    return inputs::takes(dst, of::qkv, 4) && is_vector(dst->src[of::dt], dst->src[of::alpha]->ne[1]) &&
           is_vector(dst->src[of::a], dst->src[of::alpha]->ne[1]);
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const ggml_tensor * x    = dst->src[of::x];
    const int           n    = (int) x->ne[1];
    float *             next = dw::data_of<float>(dst);
    product_list        list;
    for (int each : { of::qkv, of::z, of::beta, of::alpha }) {
        const int64_t n_rows = dst->src[each]->ne[1];
        part &        made   = list.add(dst->src[each], next, n_rows);
        next += n_rows * n;
        if (each == of::beta) {
            made.end = end_of_product::sigmoid;
        } else if (each == of::alpha) {
            made.end = end_of_product::softplus;
            made.a   = dw::data_of<const float>(dst->src[of::dt]);
            made.b   = dw::data_of<const float>(dst->src[of::a]);
        }
    }
    inputs::launch(with, dst, list);
}

} // namespace delta_in

namespace attention_in {

namespace of = attention_inputs;

bool takes(const ggml_tensor * dst) {
    return inputs::takes(dst, of::weights, of::n_weights(dst));
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const ggml_tensor * x    = dst->src[of::x];
    const int           n    = (int) x->ne[1];
    float *             next = dw::data_of<float>(dst);
    product_list        list;
    for (int i = 0; i < of::n_weights(dst); ++i) {
        const ggml_tensor * weights = dst->src[of::weights + i];
        list.add(weights, next, weights->ne[1]);
        next += weights->ne[1] * n;
    }
    inputs::launch(with, dst, list);
}

} // namespace attention_in

namespace draft_in {

namespace of = draft_input;

bool takes(const ggml_tensor * dst) {
    const auto *  src = dst->src;
    const int64_t n = dst->ne[1], width = src[of::e]->ne[0];
    return is_rows(src[of::e], n) && is_rows(src[of::h], n) && src[of::h]->ne[0] == width && width <= max_width / 2 &&
           is_vector(src[of::e_norm], width) && is_vector(src[of::h_norm], width) &&
           is_weights(src[of::weights], 2 * width) && dw::is_f32(dst) && src[of::weights]->ne[1] == dst->ne[0];
}

size_t workspace(const ggml_tensor * dst) {
    return activations::bytes(dst->ne[1], dst->src[of::weights]->ne[0]);
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const auto * src     = dst->src;
    const float  epsilon = settings_of(dst).epsilon;
    product_list list;
    list.add(src[of::weights], dw::data_of<float>(dst), dw::stride_of(dst, 1));
    list.launch(normalised_pair{ normalised_rows(src[of::e], src[of::e_norm], epsilon),
                                 normalised_rows(src[of::h], src[of::h_norm], epsilon) },
                with.workspace, src[of::weights]->ne[0], (int) dst->ne[1], with.stream);
}

} // namespace draft_in

namespace outputs {

bool takes(const ggml_tensor * dst, const ggml_tensor * weights, const ggml_tensor * residual, int64_t width) {
    return is_rows(dst, dst->ne[1]) && is_rows(residual, dst->ne[1]) && is_weights(weights, width) &&
           weights->ne[1] == dst->ne[0] && residual->ne[0] == dst->ne[0];
}

// heads that are gated already, or none
bool is_gated(const ggml_tensor * t, int64_t n_floats) {
    return !t || (dw::is_f32(t) && ggml_is_contiguous(t) && ggml_nelements(t) == n_floats);
}

} // namespace outputs

namespace delta_out {

namespace of = delta_output;

bool takes(const ggml_tensor * dst) {
    const ggml_tensor * y = dst->src[of::y];
    const ggml_tensor * z = dst->src[of::z];
    return dw::is_f32(y) && dw::is_f32(z) && ggml_is_contiguous(y) && ggml_is_contiguous(z) && y->ne[0] % 32 == 0 &&
           y->ne[0] <= most_threads && ggml_nelements(z) == ggml_nelements(y) &&
           ggml_nelements(y) == y->ne[0] * y->ne[1] * dst->ne[1] && is_vector(dst->src[of::norm], y->ne[0]) &&
           outputs::is_gated(dst->src[of::gated], ggml_nelements(y) + delta_step::n_gated(ggml_nelements(y))) &&
           (!dst->src[of::gated] || dst->ne[1] == 1) &&
           outputs::takes(dst, dst->src[of::weights], dst->src[of::residual], y->ne[0] * y->ne[1]);
}

size_t workspace(const ggml_tensor * dst) {
    return activations::bytes(dst->ne[1], dst->src[of::weights]->ne[0]);
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const ggml_tensor *y = dst->src[of::y], *gated = dst->src[of::gated];
    const int          n = (int) dst->ne[1], size = (int) y->ne[0], width = size * (int) y->ne[1];
    const float        epsilon = settings_of(dst).epsilon;
    product_list       list    = added_product(dst, dst->src[of::weights], dst->src[of::residual]);
    if (gated && width % 64 == 0 && list.can_be_late<late_gated>(width)) { // a block copies 16 bytes behind the scales
        return list.launch(late_gated{ gated_row::in(dw::data_of<float>(gated) + width, width), epsilon, width, size },
                           with.stream);
    }
    const activations x = activations::in((char *) with.workspace, n, width);
    ggml_cuda_kernel_launch(gate_heads, { dim3(n, (unsigned) y->ne[1]), dim3(size), 0, with.stream },
                            dw::data_of<const float>(y), dw::data_of<const float>(dst->src[of::z]),
                            dw::data_of<const float>(dst->src[of::norm]), epsilon, x);
    list.launch(x, n, with.stream);
}

} // namespace delta_out

namespace attention_out {

namespace of = attention_output;

bool is_gate(const ggml_tensor * gate, const ggml_tensor * y) {
    return dw::is_f32(gate) && gate->ne[0] % 32 == 0 && gate->ne[0] * gate->ne[1] == y->ne[0] &&
           gate->ne[2] == y->ne[1] && gate->nb[1] % 16 == 0 && gate->nb[2] % 16 == 0;
}

bool takes(const ggml_tensor * dst) {
    const ggml_tensor *y = dst->src[of::y], *gate = dst->src[of::gate];
    return is_rows(y, dst->ne[1]) && (!gate || is_gate(gate, y)) &&
           outputs::is_gated(dst->src[of::gated], dst->ne[1] * (y->ne[0] + flash_attention::n_gated(y->ne[0]))) &&
           outputs::takes(dst, dst->src[of::weights], dst->src[of::residual], y->ne[0]);
}

size_t workspace(const ggml_tensor * dst) {
    return activations::bytes(dst->ne[1], dst->src[of::weights]->ne[0]);
}

// of rows that attention left as weights see them
void launch_gated(const dw::launch_context & with, ggml_tensor * dst, int64_t width, int64_t n) {
    char * const at   = dw::data_of<char>(dst->src[of::gated]) + n * width * sizeof(float);
    const auto   x    = activations::quantised::in(at, n, width);
    product_list list = added_product(dst, dst->src[of::weights], dst->src[of::residual]);
    if (n == 1 && list.can_be_late<late_quants>(width)) {
        return list.launch(late_quants{ x }, 1, with.stream);
    }
    list.launch(activations{ x, nullptr }, (int) n, with.stream);
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const ggml_tensor *y = dst->src[of::y], *gate = dst->src[of::gate], *weights = dst->src[of::weights];
    const float *      values = dw::data_of<const float>(y);
    if (dst->src[of::gated] && !is_float(weights->type)) {
        launch_gated(with, dst, y->ne[0], dst->ne[1]);
    } else if (!gate) {
        add_product(with, dst, weights, dst->src[of::residual], unchanged{ values, dw::stride_of(y, 1), nullptr });
    } else {
        const gated_heads input{ values,
                                 dw::stride_of(y, 1),
                                 dw::data_of<const float>(gate),
                                 dw::stride_of(gate, 1),
                                 dw::stride_of(gate, 2),
                                 (int) gate->ne[0] };
        add_product(with, dst, weights, dst->src[of::residual], input);
    }
}

} // namespace attention_out

namespace product_op {

namespace of = product_of_rows;

bool takes(const ggml_tensor * dst) {
    const ggml_tensor *x = dst->src[of::x], *picked = dst->src[of::picked];
    const bool         are_there =
        picked ? dw::is_i32(picked) && ggml_nelements(picked) == dst->ne[1] && are_readable(x) : is_rows(x, dst->ne[1]);
    return are_there && dst->ne[1] >= 1 && dst->ne[1] <= max_rows && x->ne[0] <= max_width && dw::is_f32(dst) &&
           is_weights(dst->src[of::weights], x->ne[0]) && dst->src[of::weights]->ne[1] == dst->ne[0];
}

size_t workspace(const ggml_tensor * dst) {
    return activations::bytes(dst->ne[1], dst->src[of::x]->ne[0]);
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const ggml_tensor *x = dst->src[of::x], *picked = dst->src[of::picked];
    const unchanged    rows{ dw::data_of<const float>(x), dw::stride_of(x, 1),
                          picked ? dw::data_of<const int32_t>(picked) : nullptr };
    product_list       list;
    list.add(dst->src[of::weights], dw::data_of<float>(dst), dw::stride_of(dst, 1));
    list.launch(rows, with.workspace, x->ne[0], (int) dst->ne[1], with.stream);
}

} // namespace product_op

} // namespace

namespace dw::layer_parts {
const op_descriptor product_of_rows::on_cuda  = { product_of_rows::signature, nullptr, product_op::takes,
                                                  product_op::workspace, product_op::launch };
const op_descriptor delta_inputs::on_cuda     = { delta_inputs::signature, nullptr, delta_in::takes, inputs::workspace,
                                                  delta_in::launch };
const op_descriptor attention_inputs::on_cuda = { attention_inputs::signature, nullptr, attention_in::takes,
                                                  inputs::workspace, attention_in::launch };
const op_descriptor draft_input::on_cuda      = { draft_input::signature, nullptr, draft_in::takes, draft_in::workspace,
                                                  draft_in::launch };
const op_descriptor delta_output::on_cuda = { delta_output::signature, nullptr, delta_out::takes, delta_out::workspace,
                                              delta_out::launch };
const op_descriptor attention_output::on_cuda = { attention_output::signature, nullptr, attention_out::takes,
                                                  attention_out::workspace, attention_out::launch };
} // namespace dw::layer_parts
