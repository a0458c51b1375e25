// Begin and end of a delta-net or attention layer on the CPU: layer-parts.h.

#include "ops/layer-parts/layer-parts.h"
#include "ops/layer-parts/reference.h"

#include <algorithm>

namespace {

using namespace dw::layer_parts;

// Where the parts of a result lie that has them one after another.
struct part_writer {
    float * next;
    int64_t n_rows; // n

    // of row `row`, and leaves `next` alone
    void write(const values & part, int64_t row) const {
        std::copy(part.begin(), part.end(), next + row * (int64_t) part.size());
    }
    void pass(int64_t size) { next += size * n_rows; }
};

void run_delta_inputs(ggml_tensor * dst, int ith, int nth, void *) {
    namespace of      = delta_inputs;
    const auto *  src = dst->src;
    const int64_t n   = src[of::x]->ne[1];
    for (int64_t row = ith; row < n; row += nth) {
        const float * x = row_of(src[of::x], row);
        const values  h =
            normalised(x, (const float *) src[of::norm]->data, src[of::x]->ne[0], settings_of(dst).epsilon);
        part_writer out{ (float *) dst->data, n };
        for (int each : { of::qkv, of::z }) {
            out.write(product(src[each], h), row);
            out.pass(src[each]->ne[1]);
        }
        values beta = product(src[of::beta], h), alpha = product(src[of::alpha], h);
        for (size_t i = 0; i < beta.size(); ++i) {
            beta[i] = sigmoid(beta[i]);
            alpha[i] =
                softplus(alpha[i] + ((const float *) src[of::dt]->data)[i]) * ((const float *) src[of::a]->data)[i];
        }
        out.write(beta, row);
        out.pass((int64_t) beta.size());
        out.write(alpha, row);
    }
}

void run_attention_inputs(ggml_tensor * dst, int ith, int nth, void *) {
    namespace of      = attention_inputs;
    const auto *  src = dst->src;
    const int64_t n   = src[of::x]->ne[1];
    for (int64_t row = ith; row < n; row += nth) {
        const float * x = row_of(src[of::x], row);
        const values  h =
            normalised(x, (const float *) src[of::norm]->data, src[of::x]->ne[0], settings_of(dst).epsilon);
        part_writer out{ (float *) dst->data, n };
        for (int i = 0; i < of::n_weights(dst); ++i) {
            const ggml_tensor * weights = src[of::weights + i];
            out.write(product(weights, h), row);
            out.pass(weights->ne[1]);
        }
    }
}

void run_norm(ggml_tensor * dst, int ith, int nth, void *) {
    namespace of        = norm_of_rows;
    const auto *  src   = dst->src;
    const int64_t width = dst->ne[0];
    for (int64_t row = ith; row < dst->ne[1]; row += nth) {
        const float * norm = (const float *) src[of::norm]->data;
        const values  y    = normalised(row_of(src[of::x], row), norm, width, settings_of(dst).epsilon);
        std::copy(y.begin(), y.end(), (float *) ((char *) dst->data + row * dst->nb[1]));
    }
}

void run_product(ggml_tensor * dst, int ith, int nth, void *) {
    namespace of        = product_of_rows;
    const auto *    src = dst->src;
    const int64_t   n = dst->ne[1], width = src[of::x]->ne[0], n_rows = dst->ne[0];
    const int32_t * picked = src[of::picked] ? (const int32_t *) src[of::picked]->data : nullptr;
    for (int64_t row = 0; row < n; ++row) { // of the weights there are many
        const float * of_row = row_of(src[of::x], picked ? picked[row] : row);
        const values  x      = seen_by(src[of::weights]->type, of_row, width);
        const int64_t first = n_rows * ith / nth, end = n_rows * (ith + 1) / nth;
        const values  y = product(src[of::weights], x, first, end - first);
        std::copy(y.begin(), y.end(), (float *) ((char *) dst->data + row * dst->nb[1]) + first);
    }
}

void run_draft_input(ggml_tensor * dst, int ith, int nth, void *) {
    namespace of        = draft_input;
    const auto *  src   = dst->src;
    const int64_t width = src[of::e]->ne[0];
    for (int64_t row = ith; row < dst->ne[1]; row += nth) {
        values x;
        for (const auto [from, norm] : { std::pair{ of::e, of::e_norm }, { of::h, of::h_norm } }) {
            const values half =
                normalised(row_of(src[from], row), (const float *) src[norm]->data, width, settings_of(dst).epsilon);
            x.insert(x.end(), half.begin(), half.end());
        }
        const values y = product(src[of::weights], x);
        std::copy(y.begin(), y.end(), (float *) ((char *) dst->data + row * dst->nb[1]));
    }
}

void add_product(ggml_tensor * dst, const ggml_tensor * weights, const ggml_tensor * residual, const values & x,
                 int64_t row) {
    const values  y    = product(weights, x);
    const float * from = row_of(residual, row);
    float *       out  = (float *) ((char *) dst->data + row * dst->nb[1]);
    for (size_t i = 0; i < y.size(); ++i) {
        out[i] = from[i] + y[i];
    }
}

void run_delta_output(ggml_tensor * dst, int ith, int nth, void *) {
    namespace of       = delta_output;
    const auto *  src  = dst->src;
    const int64_t size = src[of::y]->ne[0], all = size * src[of::y]->ne[1];
    for (int64_t row = ith; row < dst->ne[1]; row += nth) {
        const float * y = (const float *) src[of::y]->data + row * all;
        const float * z = (const float *) src[of::z]->data + row * all;
        values        x(all);
        for (int64_t first = 0; first < all; first += size) {
            const values normal =
                normalised(y + first, (const float *) src[of::norm]->data, size, settings_of(dst).epsilon);
            for (int64_t i = 0; i < size; ++i) {
                x[first + i] = normal[i] * silu(z[first + i]);
            }
        }
        add_product(dst, src[of::weights], src[of::residual], x, row);
    }
}

void run_attention_output(ggml_tensor * dst, int ith, int nth, void *) {
    namespace of             = attention_output;
    const auto *        src  = dst->src;
    const ggml_tensor * gate = src[of::gate];
    for (int64_t row = ith; row < dst->ne[1]; row += nth) {
        const float * y = row_of(src[of::y], row);
        values        x(y, y + src[of::y]->ne[0]);
        for (int64_t i = 0; gate && i < (int64_t) x.size(); ++i) {
            const int64_t head = i / gate->ne[0];
            const char *  at   = (const char *) gate->data + row * gate->nb[2] + head * gate->nb[1];
            x[i] *= sigmoid(((const float *) at)[i - head * gate->ne[0]]);
        }
        add_product(dst, src[of::weights], src[of::residual], x, row);
    }
}

} // namespace

namespace dw::layer_parts {
const op_descriptor delta_inputs::on_cpu     = { delta_inputs::signature, run_delta_inputs };
const op_descriptor attention_inputs::on_cpu = { attention_inputs::signature, run_attention_inputs };
const op_descriptor norm_of_rows::on_cpu     = { norm_of_rows::signature, run_norm };
const op_descriptor product_of_rows::on_cpu  = { product_of_rows::signature, run_product };
const op_descriptor draft_input::on_cpu      = { draft_input::signature, run_draft_input };
const op_descriptor delta_output::on_cpu     = { delta_output::signature, run_delta_output };
const op_descriptor attention_output::on_cpu = { attention_output::signature, run_attention_output };
} // namespace dw::layer_parts
