// Gated delta net over a tree, and commit: see tree-ops.h.

#include "tree-ops.h"

#include "delta-net-step.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

using dw::vector_at;

namespace {

const int32_t * i32(const ggml_tensor * t) {
    return (const int32_t *) t->data;
}

// the three parts of a layer's factors
struct factors {
    factors(float * data, int64_t size, int64_t n_heads, int64_t n_key_heads, int64_t max_nodes) :
        k(data),
        u(k + max_nodes * n_key_heads * size),
        g(u + max_nodes * n_heads * size),
        end(g + max_nodes * n_heads) {}

    float * k;
    float * u;
    float * g;
    float * end;
};

// nodes in depth-first order, with depths: the states that a walk must keep are then those of one path
struct preorder {
    std::vector<int32_t> node;
    std::vector<int32_t> depth; // by node

    preorder(const int32_t * parents, int64_t n) :
        depth(n) {
        std::vector<int32_t> open(1, 0);
        while (!open.empty()) {
            const int32_t i = open.back();
            open.pop_back();
            node.push_back(i);
            depth[i] = i == 0 ? 0 : depth[parents[i]] + 1;
            for (int64_t child = n - 1; child > i; --child) {
                if (parents[child] == i) {
                    open.push_back((int32_t) child);
                }
            }
        }
    }
};

// value rows [first, last) of head h through the whole tree
void walk(const ggml_tensor * dst, const preorder & order, const factors & kept, int64_t h, int64_t first,
          int64_t last) {
    const ggml_tensor * v       = dst->src[3];
    const int64_t       size    = v->ne[0];
    const int64_t       n_heads = v->ne[1];
    const float         scale   = 1.0f / sqrtf((float) size);
    const float *       state =
        (const float *) ((const char *) dst->src[6]->data + *i32(dst->src[7]) * dst->src[6]->nb[1]) + h * size * size;
    const int64_t max_depth = *std::max_element(order.depth.begin(), order.depth.end());

    static thread_local std::vector<float> rows; // by depth; kept for its memory
    rows.resize(std::max(rows.size(), (size_t) ((max_depth + 1) * dw::delta_block * size)));
    for (int64_t j = first; j < last; j += dw::delta_block) {
        const int64_t n_rows = std::min(dw::delta_block, last - j);
        for (const int32_t i : order.node) {
            float *       to   = rows.data() + order.depth[i] * dw::delta_block * size;
            const float * from = i == 0 ? state + j * size : to - dw::delta_block * size;
            dw::delta_step(n_rows, size, from, to, expf(*vector_at(dst->src[4], h, i)), vector_at(dst->src[2], h, i),
                           vector_at(dst->src[1], h, i), vector_at(v, h, i) + j, *vector_at(dst->src[5], h, i), scale,
                           kept.u + (i * n_heads + h) * size + j, kept.end + (i * n_heads + h) * size + j);
        }
    }
}

} // namespace

void dw_tree_conv_windows(ggml_tensor * dst, int ith, int nth, void *) {
    const ggml_tensor * x          = dst->src[0];
    const ggml_tensor * states     = dst->src[1];
    const int32_t *     parents    = i32(dst->src[3]);
    const int64_t       width      = dst->ne[0];
    const int64_t       n_channels = dst->ne[1];
    const float *       state      = (const float *) ((const char *) states->data + *i32(dst->src[2]) * states->nb[1]);
    for (int64_t i = ith; i < dst->ne[2]; i += nth) {
        float * window = (float *) ((char *) dst->data + i * dst->nb[2]);
        int32_t node   = (int32_t) i;
        int64_t old    = width - 2; // newest column of the state that is not used yet
        for (int64_t w = width - 1; w >= 0; --w) {
            if (node >= 0) {
                const float * in = (const float *) ((const char *) x->data + node * x->nb[1]);
                for (int64_t c = 0; c < n_channels; ++c) {
                    window[c * width + w] = in[c];
                }
                node = node == 0 ? -1 : parents[node];
            } else {
                for (int64_t c = 0; c < n_channels; ++c) {
                    window[c * width + w] = state[c * (width - 1) + old];
                }
                --old;
            }
        }
    }
}

void dw_tree_delta_net(ggml_tensor * dst, int ith, int nth, void *) {
    const ggml_tensor * k           = dst->src[2];
    const ggml_tensor * v           = dst->src[3];
    const int64_t       size        = v->ne[0];
    const int64_t       n_heads     = v->ne[1];
    const int64_t       n_nodes     = v->ne[2];
    const int64_t       n_key_heads = k->ne[1];
    const int64_t max_nodes = (dst->ne[0] - n_nodes * n_heads * size) / (n_key_heads * size + n_heads * size + n_heads);
    const factors kept((float *) dst->data, size, n_heads, n_key_heads, max_nodes);
    const preorder order(i32(dst->src[8]), n_nodes);

    if (ith == 0) {
        for (int64_t i = 0; i < n_nodes; ++i) {
            for (int64_t h = 0; h < n_key_heads; ++h) {
                std::memcpy(kept.k + (i * n_key_heads + h) * size, vector_at(k, h, i), size * sizeof(float));
            }
            for (int64_t h = 0; h < n_heads; ++h) {
                kept.g[i * n_heads + h] = *vector_at(dst->src[4], h, i);
            }
        }
    }
    dw::for_rows(n_heads, size, ith, nth,
                 [&](int64_t h, int64_t first, int64_t last) { walk(dst, order, kept, h, first, last); });
}

void dw_tree_commit_state(ggml_tensor * dst, int ith, int nth, void *) {
    const int64_t   size        = dst->ne[0];
    const int64_t   n_heads     = dst->ne[2];
    const int32_t * path        = i32(dst->src[2]);
    const int64_t   max_nodes   = dst->src[2]->ne[0] - 1;
    const int64_t   n_key_heads = (dst->src[1]->ne[0] / max_nodes - n_heads * size - n_heads) / size;
    const factors   kept((float *) dst->src[1]->data, size, n_heads, n_key_heads, max_nodes);

    dw::for_rows(n_heads, size, ith, nth, [&](int64_t h, int64_t first, int64_t last) {
        float * state = (float *) ((char *) dst->data + h * dst->nb[2]);
        for (int64_t j = first; j < last; j += dw::delta_block) { // a block stays in the first-level cache
            const int64_t n_rows = std::min(dw::delta_block, last - j);
            for (int32_t p = 0; p < path[0]; ++p) {
                const int64_t i = path[1 + p];
                const float * k = kept.k + (i * n_key_heads + h % n_key_heads) * size;
                ggml_vec_scale_f32((int) (n_rows * size), state + j * size, expf(kept.g[i * n_heads + h]));
                for (int64_t r = j; r < j + n_rows; ++r) {
                    ggml_vec_mad_f32((int) size, state + r * size, k, kept.u[(i * n_heads + h) * size + r]);
                }
            }
        }
    });
}

void dw_tree_commit_conv(ggml_tensor * dst, int ith, int nth, void *) {
    const ggml_tensor * x          = dst->src[1];
    const int32_t *     path       = i32(dst->src[2]);
    const int64_t       n_kept     = dst->ne[0];
    const int64_t       n_channels = dst->ne[1];
    const int64_t       n_path     = path[0];
    for (int64_t c = n_channels * ith / nth; c < n_channels * (ith + 1) / nth; ++c) {
        float * state = (float *) ((char *) dst->data + c * dst->nb[1]);
        for (int64_t w = 0; w < n_kept; ++w) {
            const int64_t p = n_path - n_kept + w; // of the path; under 0: an old input
            state[w]        = p >= 0 ? *(const float *) ((const char *) x->data + path[1 + p] * x->nb[1] + c * x->nb[0])
                                     : state[n_kept + p];
        }
    }
}

void * dw_tree_op_find(const char * name) {
    static const struct {
        const char *     name;
        ggml_custom_op_t op;
    } ops[] = {
        { "dw_tree_conv_windows", dw_tree_conv_windows },
        { "dw_tree_delta_net", dw_tree_delta_net },
        { "dw_tree_commit_state", dw_tree_commit_state },
        { "dw_tree_commit_conv", dw_tree_commit_conv },
    };
    for (const auto & entry : ops) {
        if (std::strcmp(entry.name, name) == 0) {
            return (void *) entry.op;
        }
    }
    return nullptr;
}
