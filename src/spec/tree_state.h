// What a verify keeps per draft token, and the commit of those that stay. In the recurrent layers the verify reads the
// state and writes small factors; the commit applies those of the accepted path, with the additions of plain decoding in
// the same order. In the attention layers the path's rows move to the cells that plain decoding would have used. No
// copies of the state, so nothing is rolled back. Ops: src/ops/tree-ops.h, tree-attention.h.
// Must not know: drafters, samplers. Test: tests/model/engine.

#pragma once

#include "ggml-cpp.h"
#include "hooks.h"
#include "token_tree.h"
#include "tree-ops.h"

#include <memory>
#include <string>
#include <vector>

class llama_kv_cache;
class llama_memory_hybrid;

namespace draftwood {

class tree_state : public dw_verify_graph {
  public:
    // nullptr, with the reason in why_not, where the ops cannot run: another architecture, or recurrent layers on a
    // device without them
    static std::unique_ptr<tree_state> make(llama_context * target, int32_t max_nodes, std::string & why_not);

    // whether sequence 0 has a state of its own that a verify can read in place (not after a copy between sequences)
    bool ready() const;

    // whether that state stands for n_tokens positions, as after a verify that nobody disturbed
    bool holds(llama_pos n_tokens) const;

    // The next decode is a verify of this tree, its root at position pos: n_rows >= tree.size() rows, those beyond it
    // copies of the last node. With `exact` a tree's attention rounds as in plain decoding.
    void begin(const token_tree & tree, int32_t n_rows, llama_pos pos, bool exact);

    // it failed: as before begin()
    void undo();

    // keep the path i32[n] (node 0 first) of the last verify and free the rest
    void commit(const int32_t * path, int32_t n);

    int32_t max_nodes() const { return max_nodes_; }
    size_t  bytes() const { return ggml_backend_buffer_get_size(buffer_.get()); }

    int32_t       variant() const noexcept override { return branches_ ? 2 : 1; }
    void          placed(const dw_placed_rows & rows) noexcept override;
    ggml_tensor * conv_input(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cells, ggml_tensor * x,
                             int il) override;
    ggml_tensor * delta_net(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cells, ggml_tensor * q,
                            ggml_tensor * k, ggml_tensor * v, ggml_tensor * g, ggml_tensor * beta, int il) override;
    ggml_tensor * attn_scores(ggml_context * ctx, ggml_tensor * scores) override;
    ggml_tensor * attn_values(ggml_context * ctx, ggml_tensor * values, ggml_tensor * weights) override;

  private:
    struct ops {
        ggml_custom_op_t conv_windows, delta_net, commit_state, commit_conv;
        ggml_custom_op_t scores, values, commit_rows, commit_columns;
    };
    struct layer {
        ggml_tensor * conv_inputs = nullptr; // f32[C, M]
        size_t        factors     = 0;       // where the layer's begin in factors_, bytes
    };

    tree_state(llama_context * target, llama_memory_hybrid * memory, ggml_backend_ptr backend, const ops & found,
               int32_t max_nodes);

    void    allocate();
    void    build_commit(int32_t cell);
    void    build_commit_of_cache(ggml_context * ctx);
    void    set_n_threads();
    void    set_tree(const token_tree & tree, int32_t n_rows);
    void    rename_cells(int32_t n, const int32_t * path);
    int32_t cell() const; // of sequence 0; -1: none

    llama_context *       target_;
    llama_memory_hybrid * memory_;
    ggml_backend_ptr      backend_; // one of our own: a commit must not be aborted by the context's callback
    ops                   ops_;
    int32_t               max_nodes_;
    int64_t               n_factors_ = 0;                                          // f32 values of one layer
    int64_t               size_, n_heads_, n_key_heads_, n_channels_, conv_width_; // S, H, Hk, C, W of tree-ops.h

    ggml_context_ptr        tensors_;
    ggml_backend_buffer_ptr buffer_;
    std::vector<layer>      layers_;            // by model layer
    ggml_tensor *           factors_ = nullptr; // f32, all layers' one after another, then the newest one's output
    ggml_tensor *           tree_    = nullptr; // i32[M, 4], see tree-ops.h
    ggml_tensor *           path_    = nullptr; // i32[1 + M]
    ggml_tensor *           moves_   = nullptr; // i32[1 + 2 M]

    // the open verify
    std::vector<llama_token> tokens_;    // by row
    std::vector<int32_t>     rows_;      // host's copy of tree_
    std::vector<int64_t>     cells_;     // by row, counted through all streams
    std::vector<uint64_t>    ancestors_; // by row, bit j: row j
    llama_pos                pos_      = 0;
    bool                     branches_ = false; // the tree is no chain
    bool                     arranges_ = false; // and without flash attention: its scores and values are put in order

    ggml_context_ptr commit_tensors_;
    ggml_cgraph *    commit_graph_ = nullptr;
    int32_t          commit_cell_  = -1; // that commit_graph_ writes to
};

} // namespace draftwood
