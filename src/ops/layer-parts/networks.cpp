// The feed-forward halves of a layer on the CPU: layer-parts.h.

#include "ops/layer-parts/layer-parts.h"
#include "ops/layer-parts/reference.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace {

using namespace dw::layer_parts;
struct choice {
    std::vector<int32_t> experts; // best first
    values               weights;
};

choice chosen(const values & logits, int32_t n_used) {
    choice found;
    found.experts.resize(logits.size());
    std::iota(found.experts.begin(), found.experts.end(), 0);
    std::stable_sort(found.experts.begin(), found.experts.end(), [&](int32_t a, int32_t b) {
        return logits[a] > logits[b] || (std::isnan(logits[b]) && !std::isnan(logits[a]));
    });
    found.experts.resize(n_used);
    float sum = 0.0f;
    for (int32_t expert : found.experts) {
        found.weights.push_back(std::exp(logits[expert] - logits[found.experts[0]]));
        sum += found.weights.back();
    }
    for (float & weight : found.weights) {
        weight /= sum;
    }
    return found;
}

// down(silu(gate h) * up h)
values passed(const values & h, const ggml_tensor * gate, const ggml_tensor * up, const ggml_tensor * down,
              int64_t first_up, int64_t expert) {
    const int64_t n_hidden = down->ne[0];
    const values  seen     = seen_by(gate->type, h.data(), (int64_t) h.size());
    const values  ups      = product(up, seen, first_up, n_hidden, expert);
    values        hidden   = product(gate, seen, 0, n_hidden, expert);
    for (int64_t i = 0; i < n_hidden; ++i) {
        hidden[i] = silu(hidden[i]) * ups[i];
    }
    return product(down, seen_by(down->type, hidden.data(), n_hidden), 0, down->ne[1], expert);
}

void run_experts(ggml_tensor * dst, int ith, int nth, void *) {
    namespace of         = dw::layer_parts::experts;
    const auto *   src   = dst->src;
    const settings with  = settings_of(dst);
    const int64_t  width = dst->ne[0];
    for (int64_t row = ith; row < dst->ne[1]; row += nth) {
        const float *       x     = row_of(src[of::x], row);
        const values        h     = normalised(x, (const float *) src[of::norm]->data, width, with.epsilon);
        const choice        found = chosen(product(src[of::router], h), with.n_used);
        std::vector<double> sum(width, 0.0);
        const auto          add = [&](float weight, const values & y) {
            for (int64_t i = 0; i < width; ++i) {
                sum[i] += (double) weight * y[i];
            }
        };
        const int64_t first_up = with.is_joint ? src[of::down]->ne[0] : 0;
        for (int32_t rank = 0; rank < with.n_used; ++rank) {
            add(found.weights[rank],
                passed(h, src[of::gate], src[of::up], src[of::down], first_up, found.experts[rank]));
        }
        add(sigmoid(product(src[of::shared_router], h)[0]),
            passed(h, src[of::shared_gate], src[of::shared_up], src[of::shared_down], 0, 0));
        float * out = (float *) ((char *) dst->data + row * dst->nb[1]);
        for (int64_t i = 0; i < width; ++i) {
            out[i] = (float) (x[i] + sum[i]);
        }
    }
}

void run_feed_forward(ggml_tensor * dst, int ith, int nth, void *) {
    namespace of     = dw::layer_parts::feed_forward;
    const auto * src = dst->src;
    for (int64_t row = ith; row < dst->ne[1]; row += nth) {
        const float * x   = row_of(src[of::x], row);
        const values  h   = normalised(x, (const float *) src[of::norm]->data, dst->ne[0], settings_of(dst).epsilon);
        const values  y   = passed(h, src[of::gate], src[of::up], src[of::down], 0, 0);
        float *       out = (float *) ((char *) dst->data + row * dst->nb[1]);
        for (int64_t i = 0; i < dst->ne[0]; ++i) {
            out[i] = x[i] + y[i];
        }
    }
}

} // namespace

namespace dw::layer_parts {
const op_descriptor experts::on_cpu      = { experts::signature, run_experts };
const op_descriptor feed_forward::on_cpu = { feed_forward::signature, run_feed_forward };
} // namespace dw::layer_parts
