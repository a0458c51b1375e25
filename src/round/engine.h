// The speculative round on one llama_context: propose, verify, next, commit. See draftwood.h for the contract.

#pragma once

#include "drafters/drafter.h"
#include "llama/launches.h"
#include "round/checkpoints.h"
#include "round/cost_model.h"
#include "round/sequence.h"
#include "tree/token_tree.h"

#include <memory>
#include <vector>

namespace draftwood {

class engine : private context_listener {
  public:
    engine(llama_context * target, const llama_context_params & context_params, const dw_params & params);
    ~engine() override;

    engine(const engine &)             = delete;
    engine & operator=(const engine &) = delete;

    void eval(const llama_token * tokens, int32_t n_tokens, int32_t n_past, bool all_logits);

    int32_t propose(llama_token last, int32_t wanted);
    void    propose_given(llama_token last, const llama_token * draft, int32_t n_draft);
    void    propose_tree(const token_tree & tree);
    void    verify() { verify({ this }); }
    // several engines' proposals, on sequences of one context, in one decode
    static void verify(std::vector<engine *> engines);
    bool        row(int32_t & row, int32_t & n_past) const; // false: the round has ended
    llama_token next(llama_sampler * sampler) { return walk_on(sampler, nullptr); }
    // for benchmarks: samples, and then goes on to the likeliest child or ends the round, whatever came out
    llama_token next_scheduled(llama_sampler * sampler, bool accept) { return walk_on(sampler, &accept); }
    void        commit();
    double      replay(int32_t n_times);

    void    rewind();
    void    trim(int32_t n_keep);
    void    checkpoint();
    int32_t reach(int32_t n_keep) const;
    void    reset();

    int32_t            n_past() const { return n_past_; }
    int32_t            draft_tokens() const { return params_.draft_tokens; }
    const token_tree & tree() { // the newest proposal
        settle();
        return tree_;
    }
    const std::string & tree_refusal() const { return sequence_.tree_refusal(); }
    int64_t             tree_bytes() const;
    void                set_temperature(float temperature) { temperature_ = temperature; }
    void                set_top(int32_t n);
    dw_stats            stats() const;
    void                curve(dw_curve & out);
    void                stats_reset();

  private:
    // The rows of the last decode that samples can be drawn from: the i-th of the path stands for n_past = pos + i + 1.
    // From a node of tree_ the walk goes on to the child that equals the sample.
    struct walk {
        int32_t              first_row = 0; // of node 0 in the batch
        int32_t              n_rows    = 0; // of a verify
        std::vector<int32_t> path;          // nodes, the one to be sampled next included while alive
        int32_t              n_sampled = 0;
        llama_pos            pos       = 0; // of node 0
        bool                 alive     = false;
        bool                 open      = false; // rows beyond the sampled ones wait in the memory for commit
    };

    void on_flush(bool decodes) noexcept override;
    void on_replaced() noexcept override;

    int32_t positions_left() const;
    int32_t room() const;      // positions and cells that are left
    int32_t max_draft() const; // tokens that may be drafted now
    int32_t max_nodes() const; // of a tree, root included; 0: chains only
    // positions held once an open round is settled
    llama_pos settled_end() const { return walk_.open ? n_past_ : sequence_.end(); }

    void                       place(int32_t n_past);
    void                       decode(const llama_token * tokens, int32_t n_tokens, int32_t n_past, bool all_logits);
    void                       cut(int32_t n_keep);
    void                       observe(const kept_rows & kept);
    void                       drop_proposal();
    void                       forget();
    static bool                try_verify(const std::vector<engine *> & engines);
    void                       shorten();
    static void                require_together(std::vector<engine *> & engines);
    static int32_t             rows_together(const std::vector<engine *> & engines);
    void                       opened(int32_t first_row, int32_t n_rows, int64_t took, bool alone);
    template <typename F> void changing(F change);
    void                       require_known(const char * what) const;
    void                       require_kept(int32_t n_keep) const;
    bool                       moved() const;
    void                       require_whole(const char * what);
    void                       start(llama_token last);
    void                       draft(int32_t depth, int32_t budget, int32_t spine);
    void                       draft_best(int32_t n_max);
    bool                       ask(const draft_request & request);
    void                       settle();
    void                       feed_draft(decode_request & request, int32_t n_rows, bool alone);
    llama_token                walk_on(llama_sampler * sampler, const bool * accept);
    llama_token                scheduled(int32_t node, bool accept, llama_token sampled) const;
    llama_token                sample(llama_sampler * sampler, int32_t node);
    llama_token                sample_top(llama_sampler * sampler, int32_t row);
    void                       join_ngrams(int32_t depth);
    draft_request              request(int32_t depth, int32_t budget, int32_t spine) const;
    void                       learn(const std::vector<int32_t> & path);
    template <typename F> void each_drafter(F f);
    void                       measure();
    void                       measure_round(llama_token token, int32_t n_draft);

    dw_params                params_;
    sequence                 sequence_;
    std::unique_ptr<drafter> drafter_; // the one asked for; nullptr: plain steps only
    std::unique_ptr<drafter> ngram_;   // beside it, where costs_ chooses
    cost_model               costs_;
    draft_source             drafted_by_ = from_drafter;
    bool                     caught_up_  = false; // drafter_ drafted in the last round: else its next takes longer
    checkpoints              checkpoints_;
    int64_t                  verify_us_ = 0; // of the open round; 0: not known

    int32_t    n_past_ = 0;
    int32_t    gap_    = 0; // positions before n_past_ that an image spans beyond its cells
    token_tree tree_;       // the newest token and its draft
    float      temperature_    = 0.0f;
    bool       proposed_       = false;
    bool       ahead_          = false; // tree_'s tokens are on the drafter's device only
    int32_t    n_enough_       = 0; // best tokens of a row that the request's sampler decides among; 0: all are needed
    bool       fed_ahead_      = false; // and went into the verify from there
    int64_t    draft_start_us_ = 0;     // of the newest draft
    bool       measuring_      = false;
    bool       lost_           = false; // what the memory holds is unknown until reset
    walk       walk_;
    dw_stats   stats_{};
    launches   launches_; // when they began
};

template <typename F> void engine::each_drafter(F f) {
    for (drafter * d : { drafter_.get(), ngram_.get() }) {
        if (d) {
            f(*d);
        }
    }
}

// run what changes the context's memory: if it stops half-way, nobody knows what the memory holds
template <typename F> void engine::changing(F change) {
    lost_ = true;
    change();
    lost_ = false;
}

} // namespace draftwood
