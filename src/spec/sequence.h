// Sequence 0 of the target's context: decoding into it, and going back. The one owner of what is attached to that
// context (hook state, graphs, the batch, the tree state). Must not know: drafters, samplers, rounds.

#pragma once

#include "batch.h"
#include "draftwood.h"
#include "graphs.h"
#include "hooks.h"
#include "token_tree.h"
#include "tree_state.h"

#include <memory>
#include <string>
#include <vector>

namespace draftwood {

class sequence {
  public:
    // attaches to `target`, which must have no engine yet; throws failure
    sequence(llama_context * target, int32_t exact_rows);
    ~sequence();
    sequence(const sequence &)             = delete;
    sequence & operator=(const sequence &) = delete;

    // what the context's owner wants to hear (hooks.h)
    void listen(void (*flush)(void *, bool) noexcept, void (*replaced)(void *) noexcept, void * user);

    llama_context * target() const { return target_; }
    bool            mrope() const { return mrope_; } // an image holds fewer cells than it spans positions
    llama_pos       end() const { return llama_memory_seq_pos_max(memory(), 0) + 1; } // positions held
    bool            at_work() const { return at_work_; }     // it is us who decode, save or restore: hooks are not news
    bool            recurrent() const { return recurrent_; } // cuts need what checkpoints.h keeps
    int64_t         n_exact_batches() const { return state_.n_exact_batches; }
    void            reset_counters() { state_.n_exact_batches = 0; }

    void require_tokens(const llama_token * tokens, int32_t n_tokens) const;

    // the batch of the next decode; cleared by the caller, filled with rows from pos on
    row_batch & batch() { return batch_; }
    void        decode(llama_pos pos, int32_t n_tokens);

    // Make ready for drafts of up to draft_tokens, or trees of tree_budget nodes: recurrent layers cannot go back by
    // themselves, so a verify leaves their state alone, or, where our ops do not run, the context must keep snapshots.
    void prepare_drafts(int32_t draft_tokens, int32_t tree_budget);
    // false where the state is another sequence's, as after llama_memory_seq_cp: a plain step makes it our own
    bool can_draft() const { return !tree_ || tree_->ready(); }

    // why draft trees cannot be verified here, chains only; empty: they can
    const std::string & tree_refusal() const { return tree_refusal_; }
    int64_t tree_bytes() const { return tree_ ? (int64_t) tree_->bytes() : 0; }
    // rows that a verify of the tree decodes: more than its nodes only where it is no chain, and cells are free
    int32_t rows_of(const token_tree & tree, int32_t room) const;

    // decode the tree, its root at `pos`, in n_rows rows; none is kept until keep()
    void verify(const token_tree & tree, llama_pos pos, int32_t n_rows);
    // whether the last verify failed and left the memory as it was before
    bool undone() const { return undone_; }
    // of the last verify, keep the path i32[n_kept] (node 0 first); false if others changed the memory since, and
    // nothing was done
    bool keep(const token_tree & tree, llama_pos pos, const std::vector<int32_t> & path);

    // cut to n_keep positions; fails where recurrent layers cannot go back that far
    void cut(int32_t n_keep);
    bool can_cut(int32_t n_keep) const;

    size_t state_bytes(); // of save()
    // the recurrent layers' state, and cutting to n_keep positions, whose state this was
    std::vector<uint8_t> save();
    void                 restore(const std::vector<uint8_t> & state, int32_t n_keep);

    // forget what the last decode was: the memory is not what it left
    void unknown() { decoded_ = {}; }
    void clear();

  private:
    llama_memory_t memory() const { return llama_get_memory(target_); }

    // positions of the last decode: how far recurrent layers can go back
    struct decoded {
        llama_pos pos    = 0;
        int32_t   n      = 0;
        bool      rolled = false; // one roll-back per decode
    };

    llama_context *             target_;
    bool                        recurrent_;
    bool                        mrope_;
    bool                        at_work_ = false;
    bool                        in_tree_ = false; // the open verify left the recurrent state alone
    bool                        undone_  = false;
    decoded                     decoded_;
    dw_state                    state_;
    dw_graph_store              graphs_;
    row_batch                   batch_;
    std::unique_ptr<tree_state> tree_; // nullptr: rejected drafts are rolled back by seq_rm
    std::string                 tree_refusal_ = "nothing is drafted";
};

} // namespace draftwood
