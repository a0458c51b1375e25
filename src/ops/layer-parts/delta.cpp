// The middle of a gated-delta-net layer on the CPU: layer-parts.h.

#include "ops/delta-net/delta-net-step.h"
#include "ops/layer-parts/layer-parts.h"
#include "ops/layer-parts/reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace {

using namespace dw::layer_parts;

const float * cell_of(const ggml_tensor * states, const ggml_tensor * cells) {
    return (const float *) ((const char *) states->data + *(const int32_t *) cells->data * states->nb[1]);
}

void run_windows(ggml_tensor * dst, int ith, int nth, void *) {
    namespace of            = delta_windows;
    const ggml_tensor * x   = dst->src[of::x];
    const int64_t       n_x = x->ne[1] * x->ne[2], n_channels = dst->ne[1], n_old = dst->ne[0] - n_x;
    const float *       old = cell_of(dst->src[of::states], dst->src[of::cells]);
    for (int64_t c = n_channels * ith / nth; c < n_channels * (ith + 1) / nth; ++c) {
        float * row = (float *) dst->data + c * dst->ne[0];
        std::memcpy(row, old + c * n_old, n_old * sizeof(float));
        for (int64_t i = 0; i < n_x; ++i) {
            row[n_old + i] = ((const float *) x->data)[i * n_channels + c];
        }
        std::memcpy((float *) dst->src[of::target]->data + c * n_old, row + n_x, n_old * sizeof(float));
    }
}

// silu(convolution) of row r, channel c
float convolved(const ggml_tensor * windows, const ggml_tensor * kernel, int64_t r, int64_t c) {
    const int64_t n_of_a_sequence = windows->ne[0] - kernel->ne[0] + 1;
    const char *  at = (const char *) windows->data + c * windows->nb[1] + r / n_of_a_sequence * windows->nb[2] +
                      r % n_of_a_sequence * windows->nb[0];
    const float * w   = row_of(kernel, c);
    float         sum = 0.0f;
    for (int64_t j = 0; j < kernel->ne[0]; ++j) {
        sum += ((const float *) at)[j] * w[j];
    }
    return silu(sum);
}

void run_heads(ggml_tensor * dst, int ith, int nth, void *) {
    namespace of                = delta_heads;
    const settings      with    = settings_of(dst);
    const ggml_tensor * windows = dst->src[of::windows];
    const int64_t       size = with.size, n_heads = windows->ne[1] / size, n_keys = with.n_keys;
    const int64_t       n = dst->ne[0] / windows->ne[1];
    for (int64_t i = ith; i < n_heads * n; i += nth) {
        const int64_t head = i % n_heads, r = i / n_heads;
        const int64_t part      = std::min<int64_t>(head / n_keys, 2); // q, k, v
        const int64_t n_of_part = part < 2 ? n_keys : n_heads - 2 * n_keys;
        float * y = (float *) dst->data + part * n_keys * size * n + (r * n_of_part + head - part * n_keys) * size;
        double  squares = 0.0;
        for (int64_t c = 0; c < size; ++c) {
            y[c] = convolved(windows, dst->src[of::kernel], r, head * size + c);
            squares += (double) y[c] * y[c];
        }
        const float scale =
            1.0f / std::sqrt((float) (squares / (double) size) + with.epsilon) / std::sqrt((float) size);
        for (int64_t c = 0; part < 2 && c < size; ++c) {
            y[c] *= scale;
        }
    }
}

void run_step(ggml_tensor * dst, int ith, int nth, void *) {
    namespace of             = dw::layer_parts::delta_step;
    const auto *        src  = dst->src;
    const ggml_tensor * v    = src[of::v];
    const int64_t       size = v->ne[0], n_heads = v->ne[1], n = v->ne[2];
    const float *       from  = cell_of(src[of::states], src[of::cells]);
    const float         scale = 1.0f / std::sqrt((float) size);
    dw::for_rows(n_heads, size, ith, nth, [&](int64_t head, int64_t first, int64_t last) {
        for (int64_t j = first; j < last; j += dw::delta_block) {
            const int64_t n_rows = std::min(dw::delta_block, last - j);
            float         rows[dw::delta_block * dw::delta_max_row], delta[dw::delta_block];
            const int64_t at    = (head * size + j) * size;
            const float * state = from + at;
            for (int64_t r = 0; r < n; ++r) {
                dw::delta_step(n_rows, size, state, rows, expf(*dw::vector_at(src[of::g], head, r)),
                               dw::vector_at(src[of::k], head, r), dw::vector_at(src[of::q], head, r),
                               dw::vector_at(v, head, r) + j, *dw::vector_at(src[of::beta], head, r), scale, delta,
                               (float *) dst->data + (r * n_heads + head) * size + j);
                state = rows;
            }
            std::memcpy((float *) src[of::target]->data + at, rows, n_rows * size * sizeof(float));
        }
    });
}

} // namespace

namespace dw::layer_parts {
const op_descriptor delta_windows::on_cpu = { delta_windows::signature, run_windows };
const op_descriptor delta_heads::on_cpu   = { delta_heads::signature, run_heads };
const op_descriptor delta_step::on_cpu    = { delta_step::signature, run_step };
} // namespace dw::layer_parts
