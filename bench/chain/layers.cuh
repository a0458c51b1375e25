// The ops of a gated-delta-net layer of 35B-A3B on random weights. One row runs those of a plain step, more rows those
// of a verify whose tree is a chain. Must not know: how they are timed.

#pragma once

#include "chain/tensors.cuh"
#include "ops/layer-parts/layer-parts.h"
#include "ops/tree-delta-net/tree-factors.h"
#include "ops/tree-delta-net/tree-ops.h"

#include <numeric>

namespace chain {

namespace of = dw::layer_parts;

constexpr int64_t width = 2048, n_experts = 256, hidden = 512, n_heads = 32, n_keys = 16, size = 128;
constexpr int64_t channels = (2 * n_keys + n_heads) * size, n_vocab = 248320;

struct node {
    const char *              name;
    const dw::op_descriptor * op;
    ggml_tensor *             dst;
};

// Of the routed experts' gate and up, of their down, and of the shared one's. Files of Q4_K_M have Q6_K and Q4_K.
struct expert_types {
    ggml_type above = GGML_TYPE_Q4_K, down = GGML_TYPE_Q6_K, shared_down = GGML_TYPE_Q6_K;
};

struct layer_weights {
    expert_types  of_experts;
    ggml_tensor * norm       = floats({ width }, 0.1f, 1.0f);
    ggml_tensor * qkv        = weights(GGML_TYPE_Q4_K, { width, channels });
    ggml_tensor * z          = weights(GGML_TYPE_Q4_K, { width, n_heads * size });
    ggml_tensor * beta       = weights(GGML_TYPE_Q8_0, { width, n_heads });
    ggml_tensor * alpha      = weights(GGML_TYPE_Q8_0, { width, n_heads });
    ggml_tensor * dt         = floats({ n_heads });
    ggml_tensor * a          = floats({ n_heads }, 0.5f, -1.0f);
    ggml_tensor * windows    = floats({ 3 * channels, 1 }, 0.1f);
    ggml_tensor * kernel     = floats({ 4, channels }, 0.5f);
    ggml_tensor * states     = floats({ size * size * n_heads, 1 }, 0.02f);
    ggml_tensor * of_heads   = floats({ size }, 0.1f, 1.0f);
    ggml_tensor * out        = weights(GGML_TYPE_Q4_K, { n_heads * size, width }, 0.3f);
    ggml_tensor * after      = floats({ width }, 0.1f, 1.0f);
    ggml_tensor * router     = floats({ width, n_experts }, 0.05f);
    ggml_tensor * gate       = weights(of_experts.above, { width, hidden, n_experts });
    ggml_tensor * up         = weights(of_experts.above, { width, hidden, n_experts });
    ggml_tensor * down       = weights(of_experts.down, { hidden, width, n_experts }, 0.3f);
    ggml_tensor * own_router = floats({ width, 1 }, 0.02f);
    ggml_tensor * own_gate   = weights(GGML_TYPE_Q4_K, { width, hidden });
    ggml_tensor * own_up     = weights(GGML_TYPE_Q4_K, { width, hidden });
    ggml_tensor * own_down   = weights(of_experts.shared_down, { hidden, width }, 0.3f);

    explicit layer_weights(expert_types of_experts) :
        of_experts(of_experts) {}

    // as they were, for the next number of rows
    void restore() const {
        fill_floats<<<64, 256>>>((float *) windows->data, ggml_nelements(windows), 5, 0.1f, 0.0f);
        fill_floats<<<256, 256>>>((float *) states->data, ggml_nelements(states), 6, 0.02f, 0.0f);
    }
};

// A verify's tree of n rows, each the child of the one before, and what its rows leave behind.
struct chain_of_rows {
    int64_t                 n;
    dw::tree_factors_layout layout = { size, n_heads, n_keys, n };
    ggml_tensor *           tree;
    ggml_tensor *           kept    = floats({ channels, n });                            // inputs
    ggml_tensor *           scratch = floats({ layout.n_values() + size * n_heads * n }); // factors, then heads

    explicit chain_of_rows(int64_t n) :
        n(n) {
        std::vector<int32_t> rows(4 * n);
        std::iota(rows.begin(), rows.begin() + n, -1); // parents
        for (int column = 1; column < 4; ++column) {
            std::iota(rows.begin() + column * n, rows.begin() + (column + 1) * n, 0);
        }
        tree = input(GGML_TYPE_I32, { n, 4 }, rows);
    }

    ggml_tensor * heads() const {
        return tensor(GGML_TYPE_F32, { size, n_heads, n }, (float *) scratch->data + layout.n_values());
    }
};

// What layers hand on for n rows. x is a layer's input and its result.
struct rows_of_layers {
    int64_t       n;
    chain_of_rows chain   = chain_of_rows(n);
    ggml_tensor * x       = floats({ width, n });
    ggml_tensor * between = floats({ width, n });
    ggml_tensor * inputs  = floats({ (channels + n_heads * size + 2 * n_heads) * n });
    ggml_tensor * heads   = floats({ channels * n });
    ggml_tensor * gated   = floats({ size * n_heads * n + of::delta_step::n_gated(size * n_heads * n) });
    ggml_tensor * logits  = floats({ n_vocab, n });

    explicit rows_of_layers(int64_t n) :
        n(n) {}

    static ggml_tensor * view(const ggml_tensor * of, const std::vector<int64_t> & shape, int64_t first) {
        return tensor(GGML_TYPE_F32, shape, (float *) of->data + first);
    }

    static ggml_tensor * result(const ggml_tensor * dst, const std::vector<ggml_tensor *> & operands) {
        auto * made = new ggml_tensor(*dst);
        std::copy(operands.begin(), operands.end(), made->src);
        of::settings with;
        with.epsilon = 1e-6f;
        with.n_used  = 8;
        with.size    = size;
        with.n_keys  = n_keys;
        of::set(made, with);
        return made;
    }

    std::vector<node> of_layer(const layer_weights & w, ggml_tensor * cells) const {
        auto * z    = view(inputs, { size, n_heads, n }, channels * n);
        auto   made = middle_of(w, cells, z);
        made.insert(made.begin(), { "inputs", &of::delta_inputs::on_cuda,
                                    result(inputs, { x, w.norm, w.qkv, w.z, w.beta, w.alpha, w.dt, w.a }) });
        auto output = std::vector<ggml_tensor *>{ n == 1 ? view(gated, { size, n_heads, n }, 0) : chain.heads(), z,
                                                  w.of_heads, w.out, x };
        if (n == 1) {
            output.push_back(gated);
        }
        made.push_back({ "output", &of::delta_output::on_cuda, result(between, output) });
        made.push_back({ "experts", &of::experts::on_cuda,
                         result(x, { between, w.after, w.router, w.gate, w.up, w.down, w.own_router, w.own_gate,
                                     w.own_up, w.own_down }) });
        return made;
    }

  private:
    // What lies between inputs and output.
    std::vector<node> middle_of(const layer_weights & w, ggml_tensor * cells, ggml_tensor * z) const {
        const auto part = [&](int64_t rows, int64_t first) { return view(inputs, { 1, rows, n }, first * n); };
        auto *     qkv  = view(inputs, { channels, n }, 0);
        auto *     beta = part(n_heads, channels + n_heads * size);
        auto *     g    = part(n_heads, channels + n_heads * size + n_heads);
        auto *     q    = view(heads, { size, n_keys, n }, 0);
        auto *     k    = view(heads, { size, n_keys, n }, n_keys * size * n);
        auto *     v    = view(heads, { size, n_heads, n }, 2 * n_keys * size * n);
        if (n == 1) {
            return { { "front", &of::delta_front::on_cuda,
                       result(heads, { qkv, w.windows, cells, w.windows, w.kernel }) },
                     { "step", &of::delta_step::on_cuda,
                       result(gated, { q, k, v, g, beta, w.states, cells, w.states, z, w.of_heads }) } };
        }
        return { { "front", &of::delta_tree::on_cuda,
                   result(heads, { qkv, w.windows, cells, chain.tree, chain.kept, w.kernel }) },
                 { "step", &dw::tree_delta_net::on_cuda,
                   result(chain.scratch, { chain.scratch, q, k, v, g, beta, w.states, cells, chain.tree }) } };
    }
};

} // namespace chain
