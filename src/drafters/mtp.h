// MTP (NextN) drafting: the model's own next-token block in a second context on the same weights.

#pragma once

#include "drafters/ahead_tokens.h"
#include "drafters/beams.h"
#include "drafters/drafter.h"
#include "drafters/drafter_context.h"
#include "drafters/kept_states.h"
#include "llama/facts.h"
#include "verify/target_context.h"

#include <optional>

namespace draftwood {

// What the drafters of all sequences have in common. Each uses it alone while it drafts or observes.
struct mtp_context {
    mtp_context(target_context & target, const llama_context_params & context_params, const dw_params & params);

    mtp_block       block;
    drafter_context ctx;
    bool            ahead;   // drafted tokens need not come to the host before they are verified
    device_rows     outputs; // f32[n_embd, ..] the block's own hidden states: a row for each of the last decode
};

// The block sees pairs (token at p, target's hidden state at p - 1) and predicts the token at p + 1; further
// drafts feed the block its own output row as hidden state (src/models/qwen35moe.cpp, graph_mtp at the pin).
// Position 0 has no pair and stays empty, as in training. Pairs of accepted drafts stay as they were drafted, with the
// block's own hidden state; those of rejected ones go. A draft that is begun behind a verify replaces them. A tree is
// drafted level by level, each of its nodes seeing its ancestors only. Hidden states stay on the block's device; so do
// the tokens of a chain that is drafted ahead. Test: tests/model/engine, tests/model/test_parity.py.
class mtp_drafter : public drafter {
  public:
    static constexpr int32_t widest = 8; // rows of a level of a tree

    // of sequence params.seq_id; the first one makes the context from the target's parameters. Throws failure.
    mtp_drafter(target_context & target, const llama_context_params & context_params, const dw_params & params);
    ~mtp_drafter() override;

    void         observe(const kept_rows & kept) override;
    draft_result draft(const draft_request & request, token_tree & tree) override;
    const void * joint() const override { return shared_.get(); }
    void         draft_all(std::vector<joint_draft> & drafts) override; // mtp_joint.cpp
    bool         short_of_memory() const override { return ctx_.short_of_memory(); }
    int32_t      draft_vocab() const override { return ctx_.draft_vocab(); }
    void         trim(llama_pos n_keep) override;
    void         reset() override;

    llama_context * memory() override;
    dw_attachment * attached() override { return &ctx_.attached(); }

    bool    can_draft_ahead() const override { return shared_->ahead; }
    void    settle(token_tree & tree) override { drafted_.settle(tree); }
    void    feed_verify(decode_request & verify, int32_t n) override { drafted_.feed(verify, target_, n); }
    bool    begin_behind(llama_pos pos, int32_t n, bool greedy) override; // mtp_ahead.cpp
    int32_t n_begun() const override { return 1; }

    std::vector<float> mark(llama_pos pos) const override; // the hidden state at pos - 1
    void               resume(llama_pos pos, const std::vector<float> & mark) override;

  private:
    enum class graph_kind : int32_t {
        rows,        // each has an output: a token of a chain, a level of a tree, a pair
        pairs,       // the last one has an output
        ahead,       // a token that is drafted ahead
        ahead_other, // the same: two graphs take turns
        begun,       // a row for each row of a verify
        joint,       // a row of each sequence
        n,
    };

    // kept tokens whose pairs are not in the block's KV cache yet; the hidden state of tokens[i] waits as row first + i
    struct pair_queue {
        llama_pos                pos   = 0; // of the first pair
        int32_t                  first = 0;
        std::vector<llama_token> tokens;

        int32_t size() const { return (int32_t) tokens.size(); }
    };

    // The next draft, begun behind a verify: each of the verify's rows with the token that is best there, as if the
    // text went on from it. When the verify's tokens are known, one row is left, and the pairs before it.
    struct begun_draft {
        begun_draft(ggml_backend_t backend, int64_t n_embd, int64_t n_rows);
        bool takes(const ggml_tensor * top, const ggml_tensor * hidden, int32_t n) const;

        device_rows best;    // i32[1, n_rows] of the verify's rows
        device_rows states;  // f32[n_embd, n_rows] the same: hidden states
        device_rows drafted; // i32[1, n_rows] what the block drafts behind them
        device_rows outputs; // f32[n_embd, n_rows] the block's own hidden states

        llama_pos   pos     = 0;     // of the verify's root
        int32_t     n       = 0;     // rows that wait for the verify's tokens; 0: none
        int32_t     row     = -1;    // that the text goes on from; -1: none
        llama_token guessed = 0;     // its best
        bool        any     = false; // for benchmarks: the guess is right, whatever token comes
    };

    // a node of the tree whose row waits to be decoded, or was
    struct leaf {
        int32_t node;   // of the tree
        int32_t row;    // of its parent in beams_; -1: the root
        int32_t output; // of its parent in the last decode
    };

    // one of a joint draft that goes on
    struct member {
        mtp_drafter * who;
        joint_draft * draft;
        int32_t       row;  // of its newest hidden state in outputs
        float         path; // probability
    };

    bool is_ready(const draft_request & request) const;
    void push_root(const draft_request & request);
    void fed(int32_t n);
    void begin_joint(joint_draft & draft);
    void draft_next(std::vector<member> run, int32_t depth, std::vector<member> & next);
    bool decode_joint(const std::vector<member> & run, int32_t depth);
    void draft_chain(const draft_request & request, token_tree & tree);
    void draft_ahead(const draft_request & request, token_tree & tree);
    void draft_tree(const draft_request & request, token_tree & tree);
    void grow(const draft_request & request, int32_t node, int32_t output, bool keep_best, token_tree & tree);
    std::vector<leaf> best_leaves(const token_tree & tree, std::vector<leaf> leaves,
                                  const draft_request & request) const;
    int32_t           row_of(const std::vector<leaf> & level, int32_t i) const;
    bool     decode_level(const std::vector<leaf> & level, const draft_request & request, const token_tree & tree);
    void     add_row(llama_token token, llama_pos pos, bool output);
    row_feed hidden_feed(int32_t to, const device_rows & from, int64_t row, int32_t n) const;
    bool     decode(const decode_request & request, int32_t n);
    void     keep_results(int32_t n);
    void     feed(int32_t n, bool output);
    bool     take_begun(const kept_rows & kept);
    bool     is_begun_for(const draft_request & request);
    void     forget_begun();
    void     catch_up();
    int32_t  push(const llama_token * tokens, int32_t n, llama_pos pos);
    void     push_kept(const kept_rows & kept);
    void     drop_cells_from(llama_pos pos);

    target_context &             target_;
    std::shared_ptr<mtp_context> shared_;
    drafter_context &            ctx_; // shared_'s
    llama_seq_id                 seq_;
    int32_t                      n_embd_;
    int32_t                      n_rows_max_;   // pairs per decode
    int32_t                      most_waiting_; // pairs

    beams                      beams_; // rows of the last draft, if it was a tree
    pair_queue                 queue_;
    kept_states                states_;          // of queue_, and the newest one, at hidden_pos_
    ahead_tokens               drafted_;         // of a draft ahead
    std::optional<begun_draft> begun_;           // nullopt: drafts begin when they are asked for
    llama_pos                  n_fed_      = 0;  // pairs of positions under this are in the KV cache (or were skipped)
    llama_pos                  hidden_pos_ = -1; // position of the newest hidden state; -1: unknown
    int32_t n_ahead_ = -1; // tokens of the draft ahead that is being made; -1: the draft is not ahead

    std::vector<float> nothing_; // f32[n_embd], where llama.cpp wants a host's copy of what it is fed otherwise
};

} // namespace draftwood
