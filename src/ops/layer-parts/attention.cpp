// The middle of an attention layer on the CPU, up to the attention itself: layer-parts.h.

#include "ops/layer-parts/hadamard.h"
#include "ops/layer-parts/layer-parts.h"
#include "ops/layer-parts/reference.h"
#include "ops/layer-parts/rotation.h"

#include <algorithm>
#include <cmath>

namespace {

using namespace dw::layer_parts;
namespace op = attention_heads;

const float * head_of(const ggml_tensor * t, int64_t head, int64_t row) {
    return (const float *) ((const char *) t->data + head * t->nb[1] + row * t->nb[2]);
}

// Rotates the pairs of a normalised head of one row.
void rotate(values & head, const settings & with, const ggml_tensor * positions, int64_t n, int64_t row) {
    constexpr double whole = 6.283185307179586;
    const float      step  = step_of(with);
    const int        half  = with.n_dims / 2;
    for (int i = 0; i < half; ++i) {
        const int32_t position = ((const int32_t *) positions->data)[position_of(i, with) * n + row];
        const double  angle    = whole * part_of_turn(position * turns_of(i, step, with.scale));
        const float   cosine = (float) std::cos(angle), sine = (float) std::sin(angle);
        const float   a = head[i], b = head[i + half];
        head[i]        = a * cosine - b * sine;
        head[i + half] = a * sine + b * cosine;
    }
}

// Writes values `first`.. of the cache's row that `cells` names for row `row`.
void store(const values & from, ggml_tensor * cache, const ggml_tensor * cells, int64_t row, int64_t first) {
    char *        to = (char *) cache->data + ((const int64_t *) cells->data)[row] * cache->nb[1];
    const int64_t n  = (int64_t) from.size();
    if (cache->type == GGML_TYPE_F32) {
        std::copy(from.begin(), from.end(), (float *) to + first);
    } else {
        ggml_get_type_traits(cache->type)->from_float_ref(from.data(), to + ggml_row_size(cache->type, first), n);
    }
}

void run_heads(ggml_tensor * dst, int ith, int nth, void *) {
    ggml_tensor * const * src  = dst->src;
    const settings        with = settings_of(dst);
    const int64_t         size = src[op::q]->ne[0], n_heads = src[op::q]->ne[1], n = src[op::q]->ne[2];
    const auto            turned = [&](int which, int norm, int64_t head, int64_t row) {
        values found = normalised(head_of(src[which], head, row), (const float *) src[norm]->data, size, with.epsilon);
        rotate(found, with, src[op::positions], n, row);
        apply_hadamard(found.data(), size, with.k_hadamard);
        return found;
    };
    for (int64_t row = ith; row < n; row += nth) {
        for (int64_t head = 0; head < n_heads; ++head) {
            const values query = turned(op::q, op::q_norm, head, row);
            std::copy(query.begin(), query.end(), (float *) dst->data + (row * n_heads + head) * size);
        }
        for (int64_t head = 0; head < src[op::k]->ne[1]; ++head) {
            store(turned(op::k, op::k_norm, head, row), src[op::k_cache], src[op::k_cells], row, head * size);
        }
        const float * const first = row_of(src[op::v], row);
        values              v(first, first + src[op::v]->ne[0]);
        apply_hadamard(v.data(), (int64_t) v.size(), with.v_hadamard);
        store(v, src[op::v_cache], src[op::v_cells], row, 0);
    }
}

} // namespace

namespace dw::layer_parts {
const op_descriptor attention_heads::on_cpu = { attention_heads::signature, run_heads };
} // namespace dw::layer_parts
