// What a verify keeps per draft token, and the commit of those that stay. In the recurrent layers the verify reads the
// state and writes small factors; the commit applies those of the accepted path, with the additions of plain decoding
// in the same order. In the attention layers the path's rows move to the cells that plain decoding would have used. No
// copies of the state, so nothing is rolled back. What each device does of it: tree_device.h.
// Must not know: drafters, samplers. Test: tests/model/engine.

#pragma once

#include "llama/decode_request.h"
#include "llama/memory.h"
#include "tree/token_tree.h"
#include "verify/plan.h"
#include "verify/tree_device.h"

#include <memory>
#include <string>
#include <vector>

namespace draftwood {

class tree_state : public verify_graph {
  public:
    // nullptr, with the reason in why_not, where the ops cannot run: another architecture, or layers on a device
    // without them. max_rows of a verify, those of all sequences together.
    static std::unique_ptr<tree_state> make(llama_context * target, int32_t max_rows, budget_share & share,
                                            std::string & why_not);

    // whether the sequence has a state of its own that a verify can read in place (not after a copy between sequences)
    bool ready(llama_seq_id seq) const;

    // whether one ubatch can hold them, wherever their states lie
    bool ready(const std::vector<llama_seq_id> & sequences) const { return memory_.are_home(sequences); }

    // whether the sequence's state stands for n_tokens positions, as after a verify that nobody disturbed
    bool holds(llama_seq_id seq, llama_pos n_tokens) const;

    // The next decode is a verify of these trees in n_rows >= tree.size() rows each, those beyond it copies of the last
    // node. With `exact` a tree's attention rounds as in plain decoding. If the decode fails, the caller's memory_marks
    // undo what it did to the memory.
    void begin(const std::vector<planned_tree> & trees, int32_t n_rows, bool exact);

    // of a sequence of the last verify keep the path through its tree (node 0 first), and free its other rows; on a GPU
    // this is queued in front of the next decode
    void commit(llama_seq_id seq, const token_tree & tree, const std::vector<int32_t> & path);

    // wait for commits that are queued: for those who read or write the memory otherwise than by a decode
    void finish() const;

    int32_t max_rows() const { return max_rows_; }

    verify_kind   kind() const noexcept override { return plan_.branches ? verify_kind::tree : verify_kind::chain; }
    void          placed(const placed_rows & rows) noexcept override;
    ggml_tensor * conv_input(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cells, ggml_tensor * x,
                             int il) override;
    ggml_tensor * delta_net(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cells, ggml_tensor * q,
                            ggml_tensor * k, ggml_tensor * v, ggml_tensor * g, ggml_tensor * beta, int il) override;
    ggml_tensor * attn_scores(ggml_context * ctx, ggml_tensor * scores) override;
    ggml_tensor * attn_values(ggml_context * ctx, ggml_tensor * values, ggml_tensor * weights) override;

  private:
    tree_state(llama_context * target, const hybrid_memory & memory, int32_t max_rows, budget_share & share);

    static std::string refusal(llama_context * target);
    void               make_devices(budget_share & share);
    void               pack_rows();
    int32_t *          packed_column(int32_t i) { return packed_.data() + (size_t) i * max_rows_; }
    tree_device &      device_of(int32_t il);

    llama_context * target_;
    hybrid_memory   memory_;
    int32_t         max_rows_;

    std::vector<std::unique_ptr<tree_device>> devices_;

    verify_plan          plan_;   // of the open verify
    std::vector<int32_t> packed_; // its rows, `tree` i32[M, 4] of ops/tree-delta-net/tree-ops.h
    bool arranges_ = false;       // on a CPU without flash attention, scores and values of branches are put in order
};

} // namespace draftwood
