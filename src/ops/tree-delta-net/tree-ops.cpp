// Gated delta net over a tree, and commit: see tree-ops.h.

#include "ops/tree-delta-net/tree-ops.h"

#include "ops/delta-net/delta-net-step.h"
#include "ops/tree-delta-net/tree-factors.h"
#include "ops/tree-delta-net/tree-rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

using dw::vector_at;
namespace windows      = dw::tree_conv_windows;
namespace delta        = dw::tree_delta_net;
namespace commit_state = dw::tree_commit_state;
namespace commit_conv  = dw::tree_commit_conv;

namespace {

const int32_t * i32(const ggml_tensor * t) {
    return (const int32_t *) t->data;
}

// value rows [first, last) of head h through all trees
void walk(const ggml_tensor * dst, const dw::tree_rows & tree, const dw::tree_factors & kept, int64_t h, int64_t first,
          int64_t last) {
    const ggml_tensor * v         = dst->src[delta::v];
    const ggml_tensor * states    = dst->src[delta::states];
    const int32_t *     cells     = i32(dst->src[delta::cells]);
    const int64_t       size      = v->ne[0];
    const int64_t       n_heads   = v->ne[1];
    const int64_t       n_nodes   = v->ne[2];
    const int64_t       n_rows    = n_nodes * v->ne[3];
    const float         scale     = 1.0f / sqrtf((float) size);
    const int64_t       max_depth = *std::max_element(tree.depths, tree.depths + n_rows);

    static thread_local std::vector<float> rows; // by depth; kept for its memory
    rows.resize(std::max(rows.size(), (size_t) ((max_depth + 1) * dw::delta_block * size)));
    for (int64_t j = first; j < last; j += dw::delta_block) {
        const int64_t n = std::min(dw::delta_block, last - j);
        for (int64_t o = 0; o < n_rows; ++o) {
            const int64_t i     = tree.preorder[o];
            const int64_t t     = i % n_nodes; // of sequence s
            const int64_t s     = i / n_nodes;
            float *       to    = rows.data() + tree.depths[i] * dw::delta_block * size;
            const float * state = (const float *) ((const char *) states->data + cells[s] * states->nb[1]);
            const float * from  = tree.parents[i] < 0 ? state + (h * size + j) * size : to - dw::delta_block * size;
            dw::delta_step(n, size, from, to, expf(*vector_at(dst->src[delta::g], h, t, s)),
                           vector_at(dst->src[delta::k], h, t, s), vector_at(dst->src[delta::q], h, t, s),
                           vector_at(v, h, t, s) + j, *vector_at(dst->src[delta::beta], h, t, s), scale,
                           kept.u + (i * n_heads + h) * size + j, kept.end + (i * n_heads + h) * size + j);
        }
    }
}

void run_conv_windows(ggml_tensor * dst, int ith, int nth, void *) {
    const ggml_tensor * x      = dst->src[windows::x];
    const ggml_tensor * states = dst->src[windows::states];
    const int32_t *     cells  = i32(dst->src[windows::cells]);
    const dw::tree_rows tree(dst->src[windows::tree]);
    const int64_t       width      = dst->ne[0];
    const int64_t       n_channels = dst->ne[1];
    const int64_t       n_nodes    = dst->ne[2] / dst->src[windows::cells]->ne[0];
    for (int64_t i = ith; i < dst->ne[2]; i += nth) {
        const float * state  = (const float *) ((const char *) states->data + cells[i / n_nodes] * states->nb[1]);
        float *       window = (float *) ((char *) dst->data + i * dst->nb[2]);
        int32_t       node   = (int32_t) i;
        int64_t       old    = width - 2; // newest column of the state that is not used yet
        for (int64_t w = width - 1; w >= 0; --w) {
            if (node >= 0) {
                const float * in = (const float *) ((const char *) x->data + node * x->nb[1]);
                for (int64_t c = 0; c < n_channels; ++c) {
                    window[c * width + w] = in[c];
                }
                node = tree.parents[node];
            } else {
                for (int64_t c = 0; c < n_channels; ++c) {
                    window[c * width + w] = state[c * (width - 1) + old];
                }
                --old;
            }
        }
    }
}

void run_delta_net(ggml_tensor * dst, int ith, int nth, void *) {
    const ggml_tensor *    k           = dst->src[delta::k];
    const ggml_tensor *    v           = dst->src[delta::v];
    const int64_t          size        = v->ne[0];
    const int64_t          n_heads     = v->ne[1];
    const int64_t          n_nodes     = v->ne[2];
    const int64_t          n_rows      = n_nodes * v->ne[3];
    const int64_t          n_key_heads = k->ne[1];
    const dw::tree_rows    tree(dst->src[delta::tree]);
    const dw::tree_factors kept((float *) dst->data, { size, n_heads, n_key_heads, tree.max_rows });

    if (ith == 0) {
        for (int64_t i = 0; i < n_rows; ++i) {
            for (int64_t h = 0; h < n_key_heads; ++h) {
                std::memcpy(kept.k + (i * n_key_heads + h) * size, vector_at(k, h, i % n_nodes, i / n_nodes),
                            size * sizeof(float));
            }
            for (int64_t h = 0; h < n_heads; ++h) {
                kept.g[i * n_heads + h] = *vector_at(dst->src[delta::g], h, i % n_nodes, i / n_nodes);
            }
        }
    }
    dw::for_rows(n_heads, size, ith, nth,
                 [&](int64_t h, int64_t first, int64_t last) { walk(dst, tree, kept, h, first, last); });
}

void commit_state_of_layer(ggml_tensor * dst, int64_t layer, int ith, int nth) {
    const int64_t                 size    = dst->ne[0];
    const int64_t                 n_heads = dst->ne[2];
    const int32_t *               path    = i32(dst->src[commit_state::path]);
    const ggml_tensor *           factors = dst->src[commit_state::factors];
    const dw::tree_factors_layout layout =
        dw::tree_factors_of(factors->ne[0], size, n_heads, dst->src[commit_state::path]->ne[0] - 1);
    const dw::tree_factors kept((float *) ((char *) factors->data + layer * factors->nb[1]), layout);

    dw::for_rows(n_heads, size, ith, nth, [&](int64_t h, int64_t first, int64_t last) {
        float * state = (float *) ((char *) dst->data + layer * dst->nb[3] + h * dst->nb[2]);
        for (int64_t j = first; j < last; j += dw::delta_block) { // a block stays in the first-level cache
            const int64_t n_rows = std::min(dw::delta_block, last - j);
            for (int32_t p = 0; p < path[0]; ++p) {
                const int64_t i = path[1 + p];
                const float * k = kept.k + (i * layout.n_key_heads + h % layout.n_key_heads) * size;
                ggml_vec_scale_f32((int) (n_rows * size), state + j * size, expf(kept.g[i * n_heads + h]));
                for (int64_t r = j; r < j + n_rows; ++r) {
                    ggml_vec_mad_f32((int) size, state + r * size, k, kept.u[(i * n_heads + h) * size + r]);
                }
            }
        }
    });
}

void run_commit_state(ggml_tensor * dst, int ith, int nth, void *) {
    for (int64_t layer = 0; layer < dst->ne[3]; ++layer) {
        commit_state_of_layer(dst, layer, ith, nth);
    }
}

void run_commit_conv(ggml_tensor * dst, int ith, int nth, void *) {
    const ggml_tensor * x          = dst->src[commit_conv::x];
    const int32_t *     path       = i32(dst->src[commit_conv::path]);
    const int64_t       n_kept     = dst->ne[0];
    const int64_t       n_channels = dst->ne[1];
    const int64_t       n_path     = path[0];
    const int64_t       n          = n_channels * dst->ne[2]; // channels of all layers
    for (int64_t i = n * ith / nth; i < n * (ith + 1) / nth; ++i) {
        const int64_t c = i % n_channels, layer = i / n_channels;
        float *       state = (float *) ((char *) dst->data + layer * dst->nb[2] + c * dst->nb[1]);
        const char *  in    = (const char *) x->data + layer * x->nb[2] + c * x->nb[0];
        for (int64_t w = 0; w < n_kept; ++w) {
            const int64_t p = n_path - n_kept + w; // of the path; under 0: an old input
            state[w]        = p >= 0 ? *(const float *) (in + path[1 + p] * x->nb[1]) : state[n_kept + p];
        }
    }
}

} // namespace

const dw::op_descriptor windows::on_cpu      = { windows::signature, run_conv_windows };
const dw::op_descriptor delta::on_cpu        = { delta::signature, run_delta_net };
const dw::op_descriptor commit_state::on_cpu = { commit_state::signature, run_commit_state };
const dw::op_descriptor commit_conv::on_cpu  = { commit_conv::signature, run_commit_conv };
