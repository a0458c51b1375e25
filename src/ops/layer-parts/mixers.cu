// Begin and end of a delta-net or attention layer on CUDA: layer-parts.h. Two kernels each: the activations, a row a
// block, then all products. A kernel starts while the one before it ends, and asks for its
// weights in the meantime.

#include "ops/layer-parts/products.cuh"

namespace {

using namespace dw::layer_parts;

// y, z [heads][size] of a row: rms_norm(y) * norm * silu(z). A warp a head.
__global__ void normalise_gated(const float * y, const float * z, const float * norm, float epsilon, int size,
                                activations out) {
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const int     row = blockIdx.y, head = blockIdx.x, lane = threadIdx.x;
    const float * from = y + (int64_t) row * out.width + head * size;
    const float * gate = z + (int64_t) row * out.width + head * size;
    float         sum  = 0.0f;
    for (int i = 4 * lane; i < size; i += 128) {
        const float4 v = *(const float4 *) (from + i);
        sum            = add_products(sum, v, v);
    }
    const float scale = rsqrtf(sum_of_lanes(sum) / size + epsilon);
    for (int first = 0; first < size; first += 128) {
        const int  i        = first + 4 * lane;
        const bool is_there = i < size;
        float4     v        = make_float4(0, 0, 0, 0);
        if (is_there) {
            const float4 a = *(const float4 *) (from + i), w = *(const float4 *) (norm + i),
                         g = *(const float4 *) (gate + i);
            v = make_float4(a.x * scale * w.x * silu(g.x), a.y * scale * w.y * silu(g.y), a.z * scale * w.z * silu(g.z),
                            a.w * scale * w.w * silu(g.w));
        }
        out.store(row, (head * size + i) / 4, v, is_there);
    }
}

// y [heads][size] of a row times sigmoid(gate). A warp 128 values.
__global__ void gated(const float * y, int64_t y_stride, const float * gate, int64_t head_stride, int64_t row_stride,
                      int size, activations out) {
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const int  row = blockIdx.y, i = 128 * blockIdx.x + 4 * threadIdx.x;
    const bool is_there = i < out.width;
    float4     v        = make_float4(0, 0, 0, 0);
    if (is_there) {
        const float4 a = *(const float4 *) (y + row * y_stride + i);
        const float4 g = *(const float4 *) (gate + row * row_stride + (i / size) * head_stride + i % size);
        v              = make_float4(a.x * sigmoid(g.x), a.y * sigmoid(g.y), a.z * sigmoid(g.z), a.w * sigmoid(g.w));
    }
    out.store(row, i / 4, v, is_there);
}

__global__ void __launch_bounds__(1024) see(const float * x, int64_t stride, activations out) {
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const int row = blockIdx.x;
    out.store(row, groups::of<GGML_TYPE_F32>(x + row * stride, out.width), 1.0f);
}

namespace inputs {

template <int n_weights> bool takes(const ggml_tensor * dst, const int (&weights)[n_weights]) {
    const ggml_tensor * x  = dst->src[0];
    bool                ok = is_rows(x, x->ne[1]) && x->ne[0] <= max_width && is_vector(dst->src[1], x->ne[0]);
    for (int each : weights) {
        ok = ok && is_weights(dst->src[each], x->ne[0]);
    }
    return ok && dw::is_f32(dst) && ggml_is_contiguous(dst);
}

size_t workspace(const ggml_tensor * dst) {
    return activations::bytes(dst->src[0]->ne[1], dst->src[0]->ne[0]);
}

} // namespace inputs

namespace delta_in {

namespace of = delta_inputs;

bool takes(const ggml_tensor * dst) {
    return inputs::takes(dst, { of::qkv, of::z, of::beta, of::alpha }) &&
           is_vector(dst->src[of::dt], dst->src[of::alpha]->ne[1]) &&
           is_vector(dst->src[of::a], dst->src[of::alpha]->ne[1]);
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const ggml_tensor * x    = dst->src[of::x];
    const int           n    = (int) x->ne[1];
    const activations   h    = activations::in((char *) with.workspace, n, x->ne[0]);
    float *             next = dw::data_of<float>(dst);
    product_list        list;
    launch_norm(with, x, dst->src[of::norm], settings_of(dst).epsilon, h);
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
    list.launch(h, n, with.stream);
}

} // namespace delta_in

namespace attention_in {

namespace of = attention_inputs;

bool takes(const ggml_tensor * dst) {
    return inputs::takes(dst, { of::q, of::k, of::v });
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const ggml_tensor * x    = dst->src[of::x];
    const int           n    = (int) x->ne[1];
    const activations   h    = activations::in((char *) with.workspace, n, x->ne[0]);
    float *             next = dw::data_of<float>(dst);
    product_list        list;
    launch_norm(with, x, dst->src[of::norm], settings_of(dst).epsilon, h);
    for (int each : { of::q, of::k, of::v }) {
        const int64_t n_rows = dst->src[each]->ne[1];
        list.add(dst->src[each], next, n_rows);
        next += n_rows * n;
    }
    list.launch(h, n, with.stream);
}

} // namespace attention_in

namespace outputs {

bool takes(const ggml_tensor * dst, const ggml_tensor * weights, const ggml_tensor * residual, int64_t width) {
    return is_rows(dst, dst->ne[1]) && is_rows(residual, dst->ne[1]) && is_weights(weights, width) &&
           weights->ne[1] == dst->ne[0] && residual->ne[0] == dst->ne[0];
}

} // namespace outputs

namespace delta_out {

namespace of = delta_output;

bool takes(const ggml_tensor * dst) {
    const ggml_tensor * y = dst->src[of::y];
    const ggml_tensor * z = dst->src[of::z];
    return dw::is_f32(y) && dw::is_f32(z) && ggml_is_contiguous(y) && ggml_is_contiguous(z) && y->ne[0] % 32 == 0 &&
           ggml_nelements(z) == ggml_nelements(y) && ggml_nelements(y) == y->ne[0] * y->ne[1] * dst->ne[1] &&
           is_vector(dst->src[of::norm], y->ne[0]) &&
           outputs::takes(dst, dst->src[of::weights], dst->src[of::residual], y->ne[0] * y->ne[1]);
}

size_t workspace(const ggml_tensor * dst) {
    return activations::bytes(dst->ne[1], dst->src[of::weights]->ne[0]);
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const ggml_tensor * y = dst->src[of::y];
    const int           n = (int) dst->ne[1], size = (int) y->ne[0];
    const activations   x = activations::in((char *) with.workspace, n, y->ne[0] * y->ne[1]);
    ggml_cuda_kernel_launch(normalise_gated, { dim3((unsigned) y->ne[1], n), dim3(32), 0, with.stream },
                            dw::data_of<const float>(y), dw::data_of<const float>(dst->src[of::z]),
                            dw::data_of<const float>(dst->src[of::norm]), settings_of(dst).epsilon, size, x);
    add_product(with, dst, dst->src[of::weights], dst->src[of::residual], x);
}

} // namespace delta_out

namespace attention_out {

namespace of = attention_output;

bool takes(const ggml_tensor * dst) {
    const ggml_tensor * y    = dst->src[of::y];
    const ggml_tensor * gate = dst->src[of::gate];
    return is_rows(y, dst->ne[1]) && dw::is_f32(gate) && gate->ne[0] % 32 == 0 &&
           gate->ne[0] * gate->ne[1] == y->ne[0] && gate->ne[2] == dst->ne[1] && gate->nb[1] % 16 == 0 &&
           gate->nb[2] % 16 == 0 && outputs::takes(dst, dst->src[of::weights], dst->src[of::residual], y->ne[0]);
}

size_t workspace(const ggml_tensor * dst) {
    return activations::bytes(dst->ne[1], dst->src[of::weights]->ne[0]);
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const ggml_tensor * y    = dst->src[of::y];
    const ggml_tensor * gate = dst->src[of::gate];
    const int           n    = (int) dst->ne[1];
    const activations   x    = activations::in((char *) with.workspace, n, y->ne[0]);
    ggml_cuda_kernel_launch(gated, { dim3(dw::n_blocks(y->ne[0], 128), n), dim3(32), 0, with.stream },
                            dw::data_of<const float>(y), dw::stride_of(y, 1), dw::data_of<const float>(gate),
                            dw::stride_of(gate, 1), dw::stride_of(gate, 2), (int) gate->ne[0], x);
    add_product(with, dst, dst->src[of::weights], dst->src[of::residual], x);
}

} // namespace attention_out

namespace product_op {

namespace of = product_of_rows;

bool takes(const ggml_tensor * dst) {
    const ggml_tensor * x = dst->src[of::x];
    return is_rows(x, dst->ne[1]) && x->ne[0] <= max_width && dw::is_f32(dst) &&
           is_weights(dst->src[of::weights], x->ne[0]) && dst->src[of::weights]->ne[1] == dst->ne[0];
}

size_t workspace(const ggml_tensor * dst) {
    return activations::bytes(dst->ne[1], dst->src[of::x]->ne[0]);
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const ggml_tensor * x    = dst->src[of::x];
    const activations   seen = activations::in((char *) with.workspace, x->ne[1], x->ne[0]);
    ggml_cuda_kernel_launch(see, { dim3((unsigned) x->ne[1]), dim3(threads_for(x->ne[0])), 0, with.stream },
                            dw::data_of<const float>(x), dw::stride_of(x, 1), seen);
    product_list list;
    list.add(dst->src[of::weights], dw::data_of<float>(dst), dw::stride_of(dst, 1));
    list.launch(seen, (int) dst->ne[1], with.stream);
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
const op_descriptor delta_output::on_cuda = { delta_output::signature, nullptr, delta_out::takes, delta_out::workspace,
                                              delta_out::launch };
const op_descriptor attention_output::on_cuda = { attention_output::signature, nullptr, attention_out::takes,
                                                  attention_out::workspace, attention_out::launch };
} // namespace dw::layer_parts
