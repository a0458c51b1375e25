// DFlash block drafting: a small model of its own fills a whole block of masked positions in one decode, attending to
// features that were read inside the target (arXiv:2602.06036; src/models/dflash.cpp at the pin).

#pragma once

#include "drafters/ahead_tokens.h"
#include "drafters/drafter.h"
#include "drafters/drafter_context.h"
#include "llama/device_rows.h"
#include "verify/target_context.h"

#include <memory>
#include <string>

namespace draftwood {

struct dflash_file;

// The drafter's model and context, which all sequences of a target have in common.
struct dflash_context {
    // loads the drafter at params.drafter_path; throws failure when it does not fit the target
    dflash_context(target_context & target, const llama_context_params & context_params, const dw_params & params);

    struct free_model {
        void operator()(llama_model * model) const { llama_model_free(model); }
    };

    std::unique_ptr<llama_model, free_model> model;
    drafter_context                          ctx;
    std::vector<int32_t>                     layers; // of the target, whose inputs are read
    bool                                     ahead; // drafted tokens need not come to the host before they are verified
    int32_t                                  block_size;
    llama_token                              mask;
    bool                                     takes_gaps; // its cache does, between positions

  private:
    dflash_context(target_context & target, const llama_context_params & context_params, const dw_params & params,
                   const dflash_file & file);
};

// Of every kept token the inputs of some target layers, side by side, are projected to keys and values of the
// drafter's cache. A draft decodes [last, mask, mask, ..] without a causal mask; row i guesses the token i further on.
// Token embeddings and output head are the target's where the file has none.
// Test: tests/model/test_dflash.py; against the modules it was trained with: tests/model/test_dflash_parity.py.
class dflash_drafter : public drafter {
  public:
    // of sequence params.seq_id; the first one makes the context. Throws failure.
    dflash_drafter(target_context & target, const llama_context_params & context_params, const dw_params & params);
    ~dflash_drafter() override;

    void         observe(const kept_rows & kept) override;
    draft_result draft(const draft_request & request, token_tree & tree) override;
    const void * joint() const override { return shared_.get(); }
    void         draft_all(std::vector<joint_draft> & drafts) override;
    bool         short_of_memory() const override { return ctx_.short_of_memory(); }
    int32_t      draft_vocab() const override { return ctx_.draft_vocab(); }
    void         trim(llama_pos n_keep) override;
    void         reset() override;

    bool can_draft_ahead() const override { return shared_->ahead; }
    void settle(token_tree & tree) override { drafted_.settle(tree); }
    void feed_verify(decode_request & verify, int32_t n) override { drafted_.feed(verify, target_, n); }
    bool begin_behind(llama_pos pos, int32_t n, bool greedy) override; // dflash_ahead.cpp

    llama_context * memory() override;
    dw_attachment * attached() override { return &ctx_.attached(); }

  private:
    enum class graph_kind : int32_t { own_block, own_features, joint_blocks, joint_features, n };

    // one of the blocks of a decode (dflash_joint.cpp)
    struct block {
        dflash_drafter * who;
        joint_draft *    draft;
        int32_t          n; // tokens that it guesses, or features that it takes
    };

    llama_pos end() const { return n_fed_ + n_waiting_; }
    int32_t   guesses(const draft_request & request) const; // 0: it cannot draft here
    bool      has_room_for(int32_t n_rows) const;
    void      take_features(const int32_t * rows, int32_t n);
    bool      take_begun(const kept_rows & kept);
    void      forget_begun();
    void      feed();
    void      add_features(decode_request & to, int32_t first, int32_t n, int32_t n_rows, bool output);
    void      fed();
    void      leave_gap(llama_pos pos);
    void      add_block(const draft_request & request, int32_t n);
    void      read_chain(const draft_request & request, int32_t n, int32_t first_row, token_tree & tree);
    void      leave_chain(const draft_request & request, int32_t n, token_tree & tree);
    void      read_tree(const draft_request & request, int32_t n, token_tree & tree);

    template <typename F> static void in_runs(std::vector<block> blocks, F decode);
    static void                       feed_together(const std::vector<block> & run);
    static void                       draft_together(const std::vector<block> & run);

    target_context &                target_;
    std::shared_ptr<dflash_context> shared_;
    drafter_context &               ctx_; // shared_'s
    llama_seq_id                    seq_;
    int32_t                         n_embd_; // of the target

    ahead_tokens drafted_; // of a draft ahead
    // f32[layers * n_embd, ..]: of kept tokens from n_fed_ on, not yet in the drafter's cache. The last
    // max_tree_nodes rows are zero.
    device_rows features_;
    int32_t     n_waiting_  = 0;     // of them
    bool        has_prompt_ = false; // some of them are a prompt's
    llama_pos   n_fed_      = 0;     // position of the first one; those before it are in the cache, but for gaps
    bool        begins_;             // behind verifies
    int32_t     n_begun_  = 0;       // rows from n_fed_ on that are in the cache, too, of tokens that may not be kept
    bool        is_begun_ = false;   // the newest kept tokens are in the cache since their verify
};

} // namespace draftwood
