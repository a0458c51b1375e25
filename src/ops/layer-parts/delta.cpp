// The middle of a gated-delta-net layer on the CPU: layer-parts.h.

#include "ops/delta-net/delta-net-step.h"
#include "ops/layer-parts/layer-parts.h"
#include "ops/layer-parts/reference.h"
#include "ops/tree-delta-net/tree-rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace {

using namespace dw::layer_parts;

const float * cell_of(const ggml_tensor * states, const ggml_tensor * cells, int64_t sequence = 0) {
    return (const float *) ((const char *) states->data + ((const int32_t *) cells->data)[sequence] * states->nb[1]);
}

// Where a head's values of a row lie in a result of q, k and v one after another.
struct heads_layout {
    int64_t size, n_heads, n_keys, n; // n_heads: of q, k and v together

    bool    is_normalised(int64_t head) const { return head < 2 * n_keys; }
    int64_t at(int64_t head, int64_t row) const {
        const int64_t part = std::min<int64_t>(head / n_keys, 2); // q, k, v
        return part * n_keys * size * n +
               (row * (part < 2 ? n_keys : n_heads - 2 * n_keys) + head - part * n_keys) * size;
    }
};

// silu(convolution) of values [head size], into y; those of q and k are normalised
void finish_head(const heads_layout & of, int64_t head, float epsilon, float * y) {
    double squares = 0.0;
    for (int64_t c = 0; c < of.size; ++c) {
        y[c] = silu(y[c]);
        squares += (double) y[c] * y[c];
    }
    const float scale = 1.0f / std::sqrt((float) (squares / (double) of.size) + epsilon) / std::sqrt((float) of.size);
    for (int64_t c = 0; of.is_normalised(head) && c < of.size; ++c) {
        y[c] *= scale;
    }
}

void run_heads(ggml_tensor * dst, int ith, int nth, void *) {
    namespace op                        = delta_heads;
    const settings      with            = settings_of(dst);
    const ggml_tensor * windows         = dst->src[op::windows];
    const ggml_tensor * kernel          = dst->src[op::kernel];
    const int64_t       n_of_a_sequence = windows->ne[0] - kernel->ne[0] + 1;
    const heads_layout  of{ with.size, windows->ne[1] / with.size, with.n_keys, dst->ne[0] / windows->ne[1] };
    for (int64_t i = ith; i < of.n_heads * of.n; i += nth) {
        const int64_t head = i % of.n_heads, r = i / of.n_heads;
        float *       y = (float *) dst->data + of.at(head, r);
        for (int64_t c = 0; c < of.size; ++c) {
            const char * at = (const char *) windows->data + (head * of.size + c) * windows->nb[1] +
                              r / n_of_a_sequence * windows->nb[2] + r % n_of_a_sequence * windows->nb[0];
            const float * w = row_of(kernel, head * of.size + c);
            y[c]            = 0.0f;
            for (int64_t j = 0; j < kernel->ne[0]; ++j) {
                y[c] += ((const float *) at)[j] * w[j];
            }
        }
        finish_head(of, head, with.epsilon, y);
    }
}

void run_front(ggml_tensor * dst, int ith, int nth, void *) {
    namespace op               = delta_front;
    const settings      with   = settings_of(dst);
    const ggml_tensor * x      = dst->src[op::x];
    const ggml_tensor * kernel = dst->src[op::kernel];
    const int64_t       n_old = kernel->ne[0] - 1, n_channels = kernel->ne[1];
    const float *       old    = cell_of(dst->src[op::states], dst->src[op::cells]);
    float *             target = (float *) dst->src[op::target]->data;
    const heads_layout  of{ with.size, n_channels / with.size, with.n_keys, dst->ne[0] / n_channels };
    values              seen(n_old + of.n);
    for (int64_t head = ith; head < of.n_heads; head += nth) {
        for (int64_t c = 0; c < of.size; ++c) {
            const int64_t channel = head * of.size + c;
            const float * w       = row_of(kernel, channel);
            std::memcpy(seen.data(), old + channel * n_old, n_old * sizeof(float));
            for (int64_t r = 0; r < of.n; ++r) {
                seen[n_old + r] = ((const float *) x->data)[r * n_channels + channel];
                float & y       = ((float *) dst->data + of.at(head, r))[c];
                y               = 0.0f;
                for (int64_t j = 0; j <= n_old; ++j) {
                    y += seen[r + j] * w[j];
                }
            }
            std::memcpy(target + channel * n_old, seen.data() + of.n, n_old * sizeof(float));
        }
        for (int64_t r = 0; r < of.n; ++r) {
            finish_head(of, head, with.epsilon, (float *) dst->data + of.at(head, r));
        }
    }
}

void run_tree(ggml_tensor * dst, int ith, int nth, void *) {
    namespace op               = delta_tree;
    const settings      with   = settings_of(dst);
    const ggml_tensor * x      = dst->src[op::x];
    const ggml_tensor * kernel = dst->src[op::kernel];
    const ggml_tensor * cells  = dst->src[op::cells];
    const dw::tree_rows tree(dst->src[op::tree]);
    const int64_t       n_old = kernel->ne[0] - 1, n_channels = kernel->ne[1];
    const heads_layout  of{ with.size, n_channels / with.size, with.n_keys, dst->ne[0] / n_channels };
    const int64_t       n_nodes = of.n / cells->ne[0];
    const float *       in      = (const float *) x->data;
    for (int64_t i = ith; i < of.n_heads * of.n; i += nth) {
        const int64_t head = i % of.n_heads, r = i / of.n_heads;
        float *       y   = (float *) dst->data + of.at(head, r);
        const float * old = cell_of(dst->src[op::states], cells, r / n_nodes);
        for (int64_t c = 0; c < of.size; ++c) {
            const int64_t channel = head * of.size + c;
            values        seen(n_old + 1);
            int64_t       node = r, newest = n_old; // of the state, how many are not used yet
            for (int64_t j = n_old; j >= 0; --j) {
                seen[j] = node >= 0 ? in[node * n_channels + channel] : old[channel * n_old + --newest];
                node    = node >= 0 ? tree.parents[node] : -1;
            }
            y[c] = 0.0f;
            for (int64_t j = 0; j <= n_old; ++j) {
                y[c] += seen[j] * row_of(kernel, channel)[j];
            }
            ((float *) dst->src[op::kept]->data)[r * n_channels + channel] = seen[n_old];
        }
        finish_head(of, head, with.epsilon, y);
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
const op_descriptor delta_heads::on_cpu = { delta_heads::signature, run_heads };
const op_descriptor delta_front::on_cpu = { delta_front::signature, run_front };
const op_descriptor delta_tree::on_cpu  = { delta_tree::signature, run_tree };
const op_descriptor delta_step::on_cpu  = { delta_step::signature, run_step };
} // namespace dw::layer_parts
