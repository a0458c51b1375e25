// Attention of few rows on the CPU: layer-parts.h. Cells are visited one after another, so what is masked between them
// changes nothing.

#include "ops/layer-parts/hadamard.h"
#include "ops/layer-parts/layer-parts.h"
#include "ops/layer-parts/reference.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace {

using namespace dw::layer_parts;
namespace op = dw::layer_parts::flash_attention;

const char * row_at(const ggml_tensor * t, int64_t i, int64_t j, int64_t s) {
    return (const char *) t->data + i * t->nb[1] + j * t->nb[2] + s * t->nb[3];
}

// n values of a type
void load(values & to, const char * from, ggml_type type) {
    ggml_get_type_traits(type)->to_float(from, to.data(), (int64_t) to.size());
}

// dst of row r, head h, stream s
void attend(ggml_tensor * dst, int64_t r, int64_t h, int64_t s) {
    const auto *        src = dst->src;
    const ggml_tensor * q = src[op::q], *k = src[op::k], *v = src[op::v];
    const int64_t       size = q->ne[0], n_heads = q->ne[2], n_cells = k->ne[1], key_head = h / (n_heads / k->ne[2]);
    const float *       query = (const float *) row_at(q, r, h, s);
    float *             out   = (float *) dst->data + ((s * q->ne[1] + r) * n_heads + h) * size;
    values              bias(n_cells), scores(n_cells, -INFINITY), cell(size);
    std::vector<double> sums(size, 0.0);
    double              total = 0.0;
    load(bias, row_at(src[op::mask], r, 0, s), GGML_TYPE_F16);
    for (int64_t c = 0; c < n_cells; ++c) {
        if (bias[c] > -INFINITY) {
            load(cell, row_at(k, c, key_head, s), k->type);
            scores[c] =
                bias[c] + (float) (std::inner_product(query, query + size, cell.data(), 0.0) * settings_of(dst).scale);
        }
    }
    const float most = *std::max_element(scores.begin(), scores.end());
    for (int64_t c = 0; c < n_cells; ++c) {
        if (bias[c] > -INFINITY) {
            const double weight = std::exp((double) scores[c] - most);
            load(cell, row_at(v, c, key_head, s), v->type);
            total += weight;
            for (int64_t i = 0; i < size; ++i) {
                sums[i] += weight * cell[i];
            }
        }
    }
    for (int64_t i = 0; i < size; ++i) {
        out[i] = total == 0.0 ? 0.0f : (float) (sums[i] / total);
    }
    apply_hadamard(out, size, settings_of(dst).v_hadamard);
}

void run(ggml_tensor * dst, int ith, int nth, void *) {
    const ggml_tensor * q       = dst->src[op::q];
    const int64_t       n_heads = q->ne[2], n_rows = q->ne[1];
    for (int64_t i = ith; i < n_heads * n_rows * q->ne[3]; i += nth) {
        attend(dst, i / n_heads % n_rows, i % n_heads, i / n_heads / n_rows);
    }
}

} // namespace

namespace dw::layer_parts {
const op_descriptor flash_attention::on_cpu = { flash_attention::signature, run };
} // namespace dw::layer_parts
