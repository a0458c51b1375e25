// GATED_DELTA_NET row by row: see delta-net.h.

#include "ops/delta-net/delta-net.h"

#include "ops/delta-net/delta-net-step.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace {

bool supported(const ggml_compute_params * params, const ggml_tensor * dst) {
    for (int i = 0; i < 6; ++i) {
        if (dst->src[i]->type != GGML_TYPE_F32 || dst->src[i]->nb[0] != sizeof(float)) {
            return false;
        }
    }
    return params->use_ref && dst->src[3]->ne[0] == 1 && dst->src[2]->ne[0] <= dw::delta_max_row;
}

// value rows [first, last) of one head of one sequence
void walk(ggml_tensor * dst, int64_t h, int64_t s, int64_t first, int64_t last) {
    const ggml_tensor * v        = dst->src[2];
    const int64_t       size     = v->ne[0]; // S_v
    const int64_t       n_heads  = v->ne[1];
    const int64_t       n_tokens = v->ne[2];
    const int64_t       n_seqs   = v->ne[3];
    const int64_t       n_keep   = ggml_get_op_params_i32(dst, 0);
    const float         scale    = 1.0f / sqrtf((float) size);

    const int64_t head     = (s * n_heads + h) * size * size;
    const float * state_in = (const float *) dst->src[5]->data + head;
    float *       out      = (float *) dst->data + (s * n_tokens * n_heads + h) * size;
    float *       kept     = (float *) dst->data + size * n_heads * n_tokens * n_seqs + head;
    const int64_t n_state  = size * size * n_heads * n_seqs; // of one snapshot

    // of source i at token t; q and k repeat over sequences too
    const auto at = [&](int i, int64_t t) {
        return dw::vector_at(dst->src[i], h, t, s / (n_seqs / dst->src[i]->ne[3]));
    };

    static thread_local std::vector<float> decay; // kept for its memory
    decay.resize(n_tokens);
    for (int64_t t = 0; t < n_tokens; ++t) {
        decay[t] = expf(*at(3, t));
    }
    for (int64_t j = first; j < last; j += dw::delta_block) {
        const int64_t n_rows = std::min(dw::delta_block, last - j);
        float         rows[dw::delta_block * dw::delta_max_row];
        float         delta[dw::delta_block];
        const float * from = state_in + j * size;
        for (int64_t t = 0; t < n_tokens; ++t) {
            dw::delta_step(n_rows, size, from, rows, decay[t], at(1, t), at(0, t), at(2, t) + j, *at(4, t), scale,
                           delta, out + t * n_heads * size + j);
            from               = rows;
            const int64_t slot = n_tokens - 1 - t;
            if (slot < n_keep) {
                std::memcpy(kept + slot * n_state + j * size, rows, n_rows * size * sizeof(float));
            }
        }
    }
}

} // namespace

bool dw_op_delta_net(const ggml_compute_params * params, ggml_tensor * dst) {
    if (!supported(params, dst)) {
        return false;
    }
    const ggml_tensor * v       = dst->src[2];
    const int64_t       n_heads = v->ne[1];
    dw::for_rows(
        n_heads * v->ne[3], v->ne[0], params->ith, params->nth,
        [&](int64_t head, int64_t first, int64_t last) { walk(dst, head % n_heads, head / n_heads, first, last); });
    return true;
}
