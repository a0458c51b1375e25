// See reference.h.

#include "ops/layer-parts/reference.h"

#include "ops/layer-parts/layer-parts.h"

#include <algorithm>
#include <cmath>

namespace dw::layer_parts {

values seen_by(ggml_type weights, const float * x, int64_t n) {
    values seen(x, x + n);
    if (is_float(weights)) {
        return seen;
    }
    for (int64_t first = 0; first < n; first += 32) {
        float most = 0.0f;
        for (int64_t i = first; i < first + 32; ++i) {
            most = std::max(most, std::fabs(x[i]));
        }
        const float scale   = most / 127.0f;
        const float rounded = ggml_fp16_to_fp32(ggml_fp32_to_fp16(scale));
        for (int64_t i = first; i < first + 32; ++i) {
            seen[i] = most == 0.0f ? 0.0f : rounded * std::round(x[i] / scale);
        }
    }
    return seen;
}

values normalised(const float * x, const float * weights, int64_t n, float epsilon) {
    double squares = 0.0;
    for (int64_t i = 0; i < n; ++i) {
        squares += (double) x[i] * x[i];
    }
    const float scale = 1.0f / std::sqrt((float) (squares / (double) n) + epsilon);
    values      out(n);
    for (int64_t i = 0; i < n; ++i) {
        out[i] = x[i] * scale * weights[i];
    }
    return out;
}

values product(const ggml_tensor * weights, const values & x, int64_t first, int64_t n, int64_t expert) {
    const ggml_to_float_t to_float = ggml_get_type_traits(weights->type)->to_float;
    values                out(n), row(weights->ne[0]);
    for (int64_t i = 0; i < n; ++i) {
        const char *  stored = (const char *) weights->data + expert * weights->nb[2] + (first + i) * weights->nb[1];
        const float * w      = (const float *) stored;
        if (weights->type != GGML_TYPE_F32) {
            to_float(stored, row.data(), weights->ne[0]);
            w = row.data();
        }
        double sum = 0.0;
        for (int64_t j = 0; j < weights->ne[0]; ++j) {
            sum += (double) w[j] * x[j];
        }
        out[i] = (float) sum;
    }
    return out;
}

values product(const ggml_tensor * weights, const values & x) {
    return product(weights, seen_by(weights->type, x.data(), (int64_t) x.size()), 0, weights->ne[1]);
}

float sigmoid(float x) {
    return 1.0f / (1.0f + std::exp(-x));
}

float silu(float x) {
    return x * sigmoid(x);
}

float softplus(float x) {
    return x > 20.0f ? x : std::log(1.0f + std::exp(x));
}

} // namespace dw::layer_parts
