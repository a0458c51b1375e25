// MUL by one value a row: see mul-scalar.h.

#include "ops/mul-scalar/mul-scalar.h"

#include "ggml-cpu-impl.h"

namespace {

bool supported(const ggml_compute_params * params, const ggml_tensor * dst) {
    const ggml_tensor * src0 = dst->src[0];
    const ggml_tensor * src1 = dst->src[1];
    return params->use_ref && src1->ne[0] == 1 && src0->ne[0] > 1 && src0->type == GGML_TYPE_F32 &&
           src1->type == GGML_TYPE_F32 && dst->type == GGML_TYPE_F32 && src0->nb[0] == sizeof(float) &&
           dst->nb[0] == sizeof(float);
}

} // namespace

bool dw_op_mul_scalar(const ggml_compute_params * params, ggml_tensor * dst) {
    if (!supported(params, dst)) {
        return false;
    }
    const ggml_tensor * src0 = dst->src[0];
    const ggml_tensor * src1 = dst->src[1];
    GGML_TENSOR_BINARY_OP_LOCALS

    const int64_t n_rows = ne01 * ne02 * ne03;
    const int64_t first  = n_rows * params->ith / params->nth;
    const int64_t last   = n_rows * (params->ith + 1) / params->nth;
    for (int64_t row = first; row < last; ++row) {
        const int64_t i1 = row % ne01;
        const int64_t i2 = row / ne01 % ne02;
        const int64_t i3 = row / (ne01 * ne02);
        const float * x  = (const float *) ((const char *) src0->data + i1 * nb01 + i2 * nb02 + i3 * nb03);
        float *       y  = (float *) ((char *) dst->data + i1 * nb1 + i2 * nb2 + i3 * nb3);
        const float   s =
            *(const float *) ((const char *) src1->data + i1 % ne11 * nb11 + i2 % ne12 * nb12 + i3 % ne13 * nb13);
        for (int64_t i = 0; i < ne00; ++i) {
            y[i] = x[i] * s;
        }
    }
    return true;
}
