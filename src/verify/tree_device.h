// One device's part of a tree state: the scratch of the layers that live there, the nodes of a verify that write it,
// and the commit of a path, in the device's own stream. What the rows mean is tree_state's. Ops:
// src/ops/tree-delta-net/tree-ops.h, tree-attention.h. Must not know: sequences, positions, tokens. Test:
// tests/model/engine, tests/gpu.

#pragma once

#include "ggml-cpp.h"
#include "llama/device_budget.h"
#include "ops/door/custom-op.h"
#include "ops/tree-delta-net/tree-factors.h"
#include "ops/tree-delta-net/tree-ops.h"

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace draftwood {

// sizes S, H, Hk, C, W, M of tree-ops.h
struct tree_shape {
    int64_t size, n_heads, n_key_heads, n_channels, conv_width, max_rows;

    // f32 values that a layer keeps of a verify, beside its conv inputs
    int64_t n_factors() const { return dw::tree_factors_layout{ size, n_heads, n_key_heads, max_rows }.n_values(); }
};

// The tree ops for one device, found through its registry; nullptr: it has none.
struct tree_op_set {
    dw_custom_op conv_windows, delta_net, commit_state, commit_conv;
    dw_custom_op scores, values, commit_rows, commit_columns;
};
const tree_op_set * find_tree_ops(ggml_backend_dev_t dev);

class tree_device {
  public:
    // a recurrent layer: its states [S*S*H, n_cells] and conv states [(W-1)*C, n_cells]
    struct recurrent_layer {
        ggml_tensor * states;
        ggml_tensor * conv_states;
    };
    // tensors of a KV cache, cells last; or cells first, where values are stored transposed
    struct cache {
        ggml_tensor * tensor;
        bool          transposed;
    };
    // what of the model is here, by layer
    struct residents {
        std::map<int32_t, recurrent_layer> layers;
        std::vector<cache>                 caches;
    };

    // Computes on `backend`, the device's in the target's context, so that commits and verifies follow each other in
    // one stream; on a CPU, where a decode can be aborted, commits have a backend of their own. Throws failure.
    tree_device(ggml_backend_t backend, const tree_op_set & ops, const tree_shape & shape, residents here,
                budget_share & share);

    // the next verify's rows, i32[M, 4]
    void set_tree(const std::vector<int32_t> & rows);

    // nodes of a verify, as in verify_graph (llama/decode_request.h); il is one of this device's layers
    ggml_tensor * conv_input(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cells, ggml_tensor * x, int32_t il);
    ggml_tensor * delta_net(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cells, ggml_tensor * q,
                            ggml_tensor * k, ggml_tensor * v, ggml_tensor * g, ggml_tensor * beta, int32_t il);
    ggml_tensor * attn_scores(ggml_context * ctx, ggml_tensor * scores);
    ggml_tensor * attn_values(ggml_context * ctx, ggml_tensor * values, ggml_tensor * weights);

    // Make the graph of commits into this cell. Throws std::bad_alloc.
    void prepare_commit(int32_t cell);

    // Apply a path to the state in this cell, and move rows of the caches: path i32[1 + M], moves i32[1 + 2 M] of
    // tree-ops.h and tree-attention.h, as long as needed. After prepare_commit(). On a GPU it is queued only: see
    // finish(). Throws failure.
    void commit(int32_t cell, const std::vector<int32_t> & path, const std::vector<int32_t> & moves, int32_t n_threads);

    // wait for commits that are queued
    void finish() const { ggml_backend_synchronize(commit_backend()); }

    bool has(int32_t il) const { return layers_.count(il) > 0; }
    bool is_host() const { return own_backend_ != nullptr; }

  private:
    struct layer {
        recurrent_layer model;
        int64_t         index; // among this device's recurrent layers
    };
    // the commit of a path into the state in a cell
    struct commit_graph {
        std::vector<uint8_t> memory; // of `tensors`: ggml_init ends the process where it finds none
        ggml_context_ptr     tensors;
        ggml_cgraph *        graph = nullptr;
    };

    void           allocate(budget_share & share);
    void           build_commit_of_caches(commit_graph & commit);
    void           build_commit_of_states(commit_graph & commit, int32_t cell);
    void           set(ggml_tensor * to, const std::vector<int32_t> & values);
    ggml_backend_t commit_backend() const { return own_backend_ ? own_backend_.get() : backend_; }

    ggml_backend_t           backend_;
    ggml_backend_ptr         own_backend_; // on a CPU only
    const tree_op_set &      ops_;
    tree_shape               shape_;
    std::vector<cache>       caches_;
    std::map<int32_t, layer> layers_;
    ggml_context_ptr         tensors_;
    budget_lease             memory_; // of buffer_
    ggml_backend_buffer_ptr  buffer_;
    ggml_tensor *            factors_     = nullptr; // f32, all layers' one after another, then the newest one's output
    ggml_tensor *            conv_inputs_ = nullptr; // f32[C, M, layers]
    ggml_tensor *            tree_        = nullptr; // i32[M, 4], see tree-ops.h
    ggml_tensor *            path_        = nullptr; // i32[1 + M]
    ggml_tensor *            moves_       = nullptr; // i32[1 + 2 M]
    std::map<int32_t, commit_graph> commits_;        // by cell of the recurrent state
};

} // namespace draftwood
