// Who drafts in a round, how far and how wide: the drafter asked for, n-grams beside it, the cost model that chooses.
// A drafter that fails costs drafts, never the request, and is counted. Must not know: the target's memory, samplers.
// Test: tests/model/engine/test_auto_trees.py, tests/model/test_auto_length.py.

#pragma once

#include "drafters/drafter.h"
#include "round/batch_model.h"
#include "round/cost_model.h"
#include "round/open_round.h"

#include <memory>
#include <vector>

namespace draftwood {

struct decode_request;

// What a draft may be at most.
struct draft_limits {
    llama_pos pos;      // of the root
    int32_t   n_tokens; // of a path
    int32_t   n_nodes;  // of a tree, root included; 0: chains only
};

class drafting {
  public:
    // Makes the drafter that `params` names. Counts into `stats`, which must outlive this. Throws failure.
    drafting(target_context & target, const llama_context_params & context_params, const dw_params & params,
             dw_stats & stats);

    bool               has_drafter() const { return drafter_ != nullptr; }
    bool               plain_step_comes() const { return chooses() && costs_.plain_step_comes(); }
    bool               chooses() const { return chooses_ && drafter_; } // by costs
    cost_model &       costs() { return costs_; }
    const cost_model & costs() const { return costs_; }
    batch_model &      together() const { return *together_; } // shared by engines of the context
    void               set_temperature(float temperature) { temperature_ = temperature; }
    bool               is_greedy() const { return temperature_ == 0.0f; }

    // Grows the proposal's tree from its root.
    void propose(proposal & draft, const draft_limits & limits);
    // The same by the drafter alone, to measure it: n_tokens, which are on the host when it returns.
    void propose_alone(proposal & draft, llama_pos pos, int32_t n_tokens);

    // What a sequence of a batch could draft, and n-grams found to draft; a root alone: they were not asked.
    struct offer {
        batch_model::member member{};
        draft_source        source = from_drafter;
        token_tree          found{ 0 };
    };
    // What a round is to be drafted with; depth 0: nothing is left to do.
    struct plan {
        draft_request request{};
        draft_choice  choice{};
        token_tree    found{ 0 }; // by n-grams; a root alone: they were not asked
        bool          chosen = false;
    };
    // propose() in parts, for propose_batch. A plan comes first: by this sequence's own costs, or of an offer whose
    // length was chosen for all.
    offer make_offer(const proposal & draft, const draft_limits & limits);
    plan  plan_draft(proposal & draft, const draft_limits & limits);
    plan  plan_offered(proposal & draft, const draft_limits & limits, const offer & offer, int32_t n_tokens);
    // Plans with the same value can be carried out together. nullptr: carry_out() does it alone.
    const void * joint(const plan & plan) const;
    void         carry_out(proposal & draft, const plan & plan);
    // join(): what draft_all() is to make of the plan; `index` is the caller's. joined(): it was made as one of n
    // drafts that took so many microseconds each.
    joint_draft join(proposal & draft, const plan & plan, llama_seq_id seq, size_t index) const;
    void        joined(proposal & draft, const joint_draft & made, int64_t took, int32_t n);

    // Fetches the tokens of a draft from its device.
    void settle(proposal & draft);
    // Before a verify of n_rows rows. A draft on the drafter's device goes straight into a verify of it alone;
    // otherwise its tokens are fetched.
    void feed(proposal & draft, decode_request & verify, int32_t n_rows, bool alone);
    // Behind a verify of it alone, which was fed from the device, from `pos` on: the next draft may begin.
    void begin_behind(const proposal & draft, llama_pos pos);
    // Microseconds of a verify that was fed from the device: those since the draft began, without what drafting is
    // known to take. 0: not known.
    int64_t verify_time(const proposal & draft) const;

    // A round took this path through the tree, root included. ended: its last token was no draft.
    void learn(const proposal & draft, const std::vector<int32_t> & path, bool ended);
    // Its verify of n_rows and its commit took `us`; 0: not known. Once a round.
    void add_round_time(const proposal & draft, int32_t n_rows, int64_t us);

    // what happened to the sequence, for all drafters
    void               observe(const kept_rows & kept);
    void               trim(llama_pos n_keep);
    void               reset();
    std::vector<float> mark(llama_pos pos) const;
    void               resume(llama_pos pos, const std::vector<float> & mark);
    llama_context *    memory() { return drafter_ ? drafter_->memory() : nullptr; }
    dw_attachment *    attached() { return drafter_ ? drafter_->attached() : nullptr; } // the drafter's
    int32_t            draft_vocab() const { return drafter_ ? drafter_->draft_vocab() : 0; }
    bool               short_of_memory() const { return drafter_ && drafter_->short_of_memory(); }

  private:
    plan plan_best(proposal & draft, const draft_limits & limits);
    void draft(proposal & draft, const draft_request & request, const token_tree * found, bool alone);
    bool ask(proposal & draft, const draft_request & request);
    void guessed(bool right);
    bool is_timed(int32_t n_tokens) const;
    bool judge(proposal & draft, const draft_request & request, draft_result result);
    void add_draft_time(proposal & draft, const draft_request & request, bool drafted, int64_t took, bool whole);
    draft_request request(const proposal & draft, llama_pos pos, int32_t depth, int32_t budget, int32_t spine) const;
    token_tree    look_up(const proposal & draft, llama_pos pos, int32_t depth);
    void          join_ngrams(token_tree & tree, const token_tree & found, int32_t depth) const;
    template <typename F> void each_drafter(F f);

    bool                         chooses_;
    float                        p_min_;
    int32_t                      tree_budget_;
    float                        temperature_ = 0.0f;
    cost_model                   costs_;
    std::shared_ptr<batch_model> together_;
    std::unique_ptr<drafter>     drafter_; // the one asked for; nullptr: plain steps only
    std::unique_ptr<drafter>     ngram_;   // beside it
    dw_stats &                   stats_;

    // A draft was begun. If its round is observed and the next draft is asked for, that tells whether it was of use.
    enum class guess { none, made, observed };
    guess   begun_       = guess::none;
    bool    may_begin_   = true; // false: it failed
    int32_t n_untimed_   = 0;    // drafts in a row whose time is not known
    int32_t n_wrong_     = 0;    // that were not, in a row
    int32_t n_not_begun_ = 0;    // verifies to come behind which none begins
};

} // namespace draftwood
