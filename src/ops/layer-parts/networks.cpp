// The feed-forward halves of a layer on the CPU: layer-parts.h.

#include "ops/layer-parts/layer-parts.h"
#include "ops/layer-parts/reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace {

using namespace dw::layer_parts;

// of a row
struct chosen_of_row {
    std::vector<int32_t> experts; // best first
    values               weights; // the shared expert's last
};

chosen_of_row chosen(const values & logits, float of_shared, int32_t n_used) {
    chosen_of_row found;
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
    found.weights.push_back(sigmoid(of_shared));
    return found;
}

// down(silu(gate h) * up h)
values passed(const values & h, const ggml_tensor * gate, const ggml_tensor * up, const ggml_tensor * down,
              int64_t first_up, int64_t expert, int64_t project_down_expert) {
    const int64_t n_hidden = down->ne[0];
    const values  seen     = seen_by(gate->type, h.data(), (int64_t) h.size());
    const values  ups      = product(up, seen, first_up, n_hidden, expert);
    values        hidden   = product(gate, seen, 0, n_hidden, expert);
    for (int64_t i = 0; i < n_hidden; ++i) {
        hidden[i] = silu(hidden[i]) * ups[i];
    }
    return product(down, seen_by(down->type, hidden.data(), n_hidden), 0, down->ne[1], project_down_expert);
}

// The tensors of both ops that add up experts.
struct networks {
    const ggml_tensor *gate, *up, *down, *shared_gate, *shared_up, *shared_down;
};

// dst's row = x + the weighted networks of h. index(side, rank): where an expert lies, side 0 for gate and up, 1 for
// down
template <typename index_type> void add_networks(ggml_tensor * dst, int64_t row, const float * x, const values & h,
                                                 const networks & of, const values & weights, index_type && index) {
    const settings      with = settings_of(dst);
    std::vector<double> sum(dst->ne[0], 0.0);
    const auto          add = [&](float weight, const values & y) {
        for (size_t i = 0; i < sum.size(); ++i) {
            sum[i] += (double) weight * y[i];
        }
    };
    const int64_t first_up = with.is_joint ? of.down->ne[0] : 0;
    for (int32_t rank = 0; rank < with.n_used; ++rank) {
        add(weights[rank], passed(h, of.gate, of.up, of.down, first_up, index(0, rank), index(1, rank)));
    }
    add(weights[with.n_used], passed(h, of.shared_gate, of.shared_up, of.shared_down, 0, 0, 0));
    float * out = (float *) ((char *) dst->data + row * dst->nb[1]);
    for (size_t i = 0; i < sum.size(); ++i) {
        out[i] = (float) (x[i] + sum[i]);
    }
}

void run_experts(ggml_tensor * dst, int ith, int nth, void *) {
    namespace of        = dw::layer_parts::experts;
    const auto *   src  = dst->src;
    const settings with = settings_of(dst);
    const networks all  = { src[of::gate],        src[of::up],        src[of::down],
                            src[of::shared_gate], src[of::shared_up], src[of::shared_down] };
    for (int64_t row = ith; row < dst->ne[1]; row += nth) {
        const float *       x = row_of(src[of::x], row);
        const values        h = normalised(x, (const float *) src[of::norm]->data, dst->ne[0], with.epsilon);
        const chosen_of_row found =
            chosen(product(src[of::router], h), product(src[of::shared_router], h)[0], with.n_used);
        add_networks(dst, row, x, h, all, found.weights, [&](int, int32_t rank) { return found.experts[rank]; });
    }
}

void run_choice(ggml_tensor * dst, int ith, int nth, void *) {
    namespace of        = dw::layer_parts::choice;
    const auto *   src  = dst->src;
    const settings with = settings_of(dst);
    for (int64_t row = ith; row < src[of::x]->ne[1]; row += nth) {
        const auto under = [&](const ggml_tensor * norm) {
            return normalised(row_of(src[of::x], row), (const float *) norm->data, src[of::x]->ne[0], with.epsilon);
        };
        const values        h = under(src[of::norm]);
        const chosen_of_row found =
            chosen(product(src[of::router], h), product(src[of::shared_router], h)[0], with.n_used);
        int32_t * out = (int32_t *) dst->data + row * src[of::router]->ne[1];
        std::copy(found.experts.begin(), found.experts.end(), out);
        std::memcpy(out + with.n_used, found.weights.data(), found.weights.size() * sizeof(float));
        if (src[of::next_router]) {
            const values        logits = product(src[of::next_router], under(src[of::next_norm]));
            const chosen_of_row next   = chosen(logits, 0.0f, with.n_used);
            std::copy(next.experts.begin(), next.experts.end(), out + of::next_at(with.n_used));
        }
    }
}

void run_chosen_experts(ggml_tensor * dst, int ith, int nth, void *) {
    namespace of            = dw::layer_parts::chosen_experts;
    const auto *    src     = dst->src;
    const settings  with    = settings_of(dst);
    const networks  all     = { src[of::gate],        src[of::up],        src[of::down],
                                src[of::shared_gate], src[of::shared_up], src[of::shared_down] };
    const int32_t * indices = (const int32_t *) src[of::indices]->data;
    for (int64_t row = ith; row < dst->ne[1]; row += nth) {
        const float *   x = row_of(src[of::x], row);
        const values    h = normalised(x, (const float *) src[of::norm]->data, dst->ne[0], with.epsilon);
        values          weights(with.n_used + 1);
        const int32_t * choice = (const int32_t *) src[of::choice]->data + row * with.n_experts;
        std::memcpy(weights.data(), choice + with.n_used, weights.size() * sizeof(float));
        add_networks(dst, row, x, h, all, weights, [&](int side, int32_t rank) {
            return indices[(with.planes[side] * dst->ne[1] + row) * with.n_used + rank];
        });
    }
}

void run_feed_forward(ggml_tensor * dst, int ith, int nth, void *) {
    namespace of     = dw::layer_parts::feed_forward;
    const auto * src = dst->src;
    for (int64_t row = ith; row < dst->ne[1]; row += nth) {
        const float * x   = row_of(src[of::x], row);
        const values  h   = normalised(x, (const float *) src[of::norm]->data, dst->ne[0], settings_of(dst).epsilon);
        const values  y   = passed(h, src[of::gate], src[of::up], src[of::down], 0, 0, 0);
        float *       out = (float *) ((char *) dst->data + row * dst->nb[1]);
        for (int64_t i = 0; i < dst->ne[0]; ++i) {
            out[i] = x[i] + y[i];
        }
    }
}

} // namespace

namespace dw::layer_parts {
const op_descriptor experts::on_cpu        = { experts::signature, run_experts };
const op_descriptor choice::on_cpu         = { choice::signature, run_choice };
const op_descriptor chosen_experts::on_cpu = { chosen_experts::signature, run_chosen_experts };
const op_descriptor feed_forward::on_cpu   = { feed_forward::signature, run_feed_forward };
} // namespace dw::layer_parts
