// One sequence of the target's context: decoding into it, and going back. Must not know: drafters, samplers, rounds.
// Test: tests/model/engine/test_trim.py, tests/model/test_checkpoints.py.

#pragma once

#include "tree/token_tree.h"
#include "verify/target_context.h"

#include <memory>
#include <string>
#include <vector>

namespace draftwood {

class sequence {
  public:
    // attaches to sequence params.seq_id of `target`, which must have no engine yet; throws failure
    sequence(llama_context * target, const dw_params & params, sequence_listener & listener);
    ~sequence();
    sequence(const sequence &)             = delete;
    sequence & operator=(const sequence &) = delete;

    llama_context *  llama() const { return shared_->get(); }
    target_context & context() const { return *shared_; }
    llama_seq_id     id() const { return seq_; }
    bool             mrope() const { return mrope_; } // an image holds fewer cells than it spans positions
    llama_pos        end() const;                     // positions held, without that of a queued step
    bool             has_step() const { return end() == llama_memory_seq_pos_max(memory(), seq_); }
    bool             recurrent() const { return recurrent_; } // cuts need what checkpoints.h keeps

    void require_tokens(const llama_token * tokens, int32_t n_tokens) const;

    // evaluate tokens i32[n] at positions pos.., logits of the last or of all
    void decode(const llama_token * tokens, int32_t n, llama_pos pos, bool all_logits);

    // Make ready for drafts of up to draft_tokens, or trees of tree_budget nodes: recurrent layers cannot go back by
    // themselves, so a verify leaves their state alone, or, where our ops do not run, the context must keep snapshots.
    void prepare_drafts(int32_t draft_tokens, int32_t tree_budget);
    // false where the state is another sequence's, as after llama_memory_seq_cp: a plain step makes it our own
    bool can_draft() const { return !trees() || trees()->ready(seq_); }
    // why draft trees cannot be verified here, chains only; empty: they can
    const std::string & tree_refusal() const { return tree_refusal_; }
    // Rows that a verify of the tree decodes: its nodes. A tree that is no chain is padded to a bucket if there is
    // room.
    int32_t rows_of(const token_tree & tree, int32_t room) const;

    // a verify was decoded by the context, n_rows of it this sequence's; by: the tree state that commits them, or
    // nullptr
    void verified(llama_pos pos, int32_t n_rows, tree_state * by);
    // Of the last verify keep the path i32[n_kept] (node 0 first). Returns false, and does nothing, if others changed
    // the memory since.
    bool keep(const token_tree & tree, llama_pos pos, const std::vector<int32_t> & path);

    // cut to n_keep positions; fails where recurrent layers cannot go back that far
    void cut(int32_t n_keep);
    bool can_cut(int32_t n_keep) const;

    size_t state_bytes() const; // of save()
    // The recurrent layers' state. restore() puts it back and cuts to n_keep positions, those that it was saved at.
    std::vector<uint8_t> save() const;
    void                 restore(const uint8_t * state, size_t n_bytes, int32_t n_keep);

    // the memory is no longer what the last decode left
    void unknown() { decoded_ = {}; }
    void clear();

  private:
    llama_memory_t memory() const { return llama_get_memory(llama()); }
    tree_state *   trees() const { return tree_refusal_.empty() ? shared_->trees() : nullptr; }

    // positions of the last decode: how far recurrent layers can go back
    struct decoded {
        llama_pos pos    = 0;
        int32_t   n      = 0;
        bool      rolled = false; // one roll-back per decode
    };

    std::shared_ptr<target_context> shared_;
    llama_seq_id                    seq_;
    sequence_listener &             listener_;
    bool                            recurrent_;
    bool                            mrope_;
    tree_state * left_in_ = nullptr; // commits the open verify; nullptr: it wrote the recurrent state
    decoded      decoded_;
    std::string  tree_refusal_ = "nothing is drafted";
};

} // namespace draftwood
