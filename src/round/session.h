// One engine of the C API: a sequence of a llama_context, its position and checkpoints, the request's parameters, who
// drafts, and the round that is open. See draftwood.h for the contract of the calls.
// Must not know: how a drafter drafts, how a verify's graph is built. Test: tests/model/engine.

#pragma once

#include "llama/launches.h"
#include "round/checkpoints.h"
#include "round/drafting.h"
#include "round/open_round.h"
#include "round/sequence.h"
#include "tree/token_tree.h"

#include <vector>

namespace draftwood {

class session : private sequence_listener {
  public:
    session(llama_context * target, const llama_context_params & context_params, const dw_params & params);
    ~session() override;

    session(const session &)             = delete;
    session & operator=(const session &) = delete;

    // --- the calls of a round (session_round.cpp, session_steps.cpp)
    int32_t     propose(llama_token last, int32_t wanted); // for this session alone; for several: propose_batch.h
    void        propose_given(llama_token last, const llama_token * draft, int32_t n_draft);
    void        propose_tree(const token_tree & tree);
    void        verify();                                   // of this session alone; of several: verify_batch.h
    bool        row(int32_t & row, int32_t & n_past) const; // false: the round has ended
    llama_token next(llama_sampler * sampler);
    void        took(llama_token token, bool scheduled = false); // the caller sampled the row
    // for benchmarks: samples, and then goes on to the likeliest child or ends the round, whatever came out
    llama_token next_scheduled(llama_sampler * sampler, bool accept);
    void        commit();                      // a step that was queued is dropped
    bool        last_row(int32_t & row) const; // false: no live row stands for n_past
    void        rewind();
    double      replay(int32_t n_times);

    // --- the memory between rounds (session_memory.cpp)
    void    eval(const llama_token * tokens, int32_t n_tokens, int32_t n_past, bool all_logits);
    void    trim(int32_t n_keep);
    void    checkpoint();
    int32_t reach(int32_t n_keep) const;
    void    reset();
    void    restore(const uint8_t * state, size_t n_bytes, int32_t n_keep);
    // the drafter's part of the sequence, for others to save, load or copy with the target's; nullptr: it has none
    llama_context * drafter_memory() { return drafting_.memory(); }
    dw_attachment * drafter_attached() { return drafting_.attached(); } // nullptr: it has no context

    // --- what a caller reads and sets
    int32_t             n_past() const { return n_past_; }
    int32_t             draft_tokens() const { return params_.draft_tokens; }
    void                fetch_draft() { drafting_.settle(round_.draft()); } // its tokens, from a drafter's device
    const token_tree &  tree() const { return round_.draft().tree; }        // the newest proposal; see fetch_draft()
    const std::string & tree_refusal() const { return sequence_.tree_refusal(); }
    void                set_request(const dw_request_params & request);
    dw_stats            stats() const;
    device_budget &     budget() const { return sequence_.context().attached().model->budget(); }
    void                curve(dw_curve & out);
    void                stats_reset();

    // --- what propose_batch and verify_batch ask
    const draftwood::sequence & sequence() const { return sequence_; }
    draftwood::drafting &       drafting() { return drafting_; }
    const draftwood::drafting & drafting() const { return drafting_; }
    bool                        is_proposed() const { return round_.is_proposed(); }
    int32_t                     room() const; // positions and cells that are left
    bool verifies_trees() const { return sequence_.tree_refusal().empty() && sequence_.can_draft(); }
    void require_known(const char * what) const; // throws if a decode failed, until reset
    void require_whole(const char * what) const; // throws if others changed the memory

    // --- what propose_batch says and asks, in this order
    void         begin_round(llama_token last);                    // its proposal is the root alone; throws failure
    draft_limits limits(int32_t wanted, int32_t n_together) const; // of that proposal, with so many sessions
    proposal &   draft() { return round_.draft(); }
    void         drop_proposal(); // if there is one

    // --- what verify_batch says, in this order
    void drop_stale_draft();             // others copied or cleared the state since the proposal
    void shorten_draft(int32_t n_nodes); // 1: a plain step
    void verify_begins();                // until it ended, nobody knows what the memory holds
    void feed_draft(decode_request & request, int32_t n_rows, bool alone);
    void begin_draft() { drafting_.begin_behind(round_.draft(), n_past_); } // behind a verify of this session alone
    void verify_failed(bool intact, bool again);                            // again: the proposal stays
    // Without a drafter, a greedy text's next step is queued behind its verify (target_context.h). It stays queued when
    // the round is closed; the next verify takes it if its root is the step's token.
    bool can_queue_step() const; // behind the verify of this proposal, which was decoded
    void queue_step();           // see target_context
    bool take_step();            // returns false if there is none for this proposal; once a verify of this one alone

    struct verify_result {
        int32_t      first_row, n_rows; // of this session, in the batch
        tree_state * committer;         // commits the accepted path; nullptr: llama_memory_seq_rm
        int64_t      batch_us;          // that the whole batch took
        int64_t      own_us;            // of so many rows of this session alone, for the cost model; 0: unknown
        bool         is_alone;          // no dropped step was still running before it
    };
    void verified(const verify_result & result);

  private:
    void on_flush(bool decodes) noexcept override;
    void on_replaced() noexcept override;

    int32_t positions_left() const;
    // n_together: sessions that are verified in the same decode
    int32_t max_draft(int32_t n_together) const; // tokens that may be drafted now
    int32_t max_nodes(int32_t n_together) const; // of a tree, root included; 0: chains only
    // positions held once an open round is settled
    llama_pos settled_end() const { return round_.is_open() ? n_past_ : sequence_.end(); }
    bool      moved() const; // others changed the memory without a word

    void                              close_round();
    template <typename F> llama_token walk_on(const char * what, F choose); // choose: the token of a row and node
    llama_token                       sample(llama_sampler * sampler, int32_t row);
    void                              lose_round();
    void                              forget();
    void                              place(int32_t n_past);
    void                       decode(const llama_token * tokens, int32_t n_tokens, int32_t n_past, bool all_logits);
    void                       cut(int32_t n_keep);
    void                       require_kept(int32_t n_keep) const;
    template <typename F> void changing(F change);
    void                       measure();
    void                       measure_round(llama_token token, int32_t n_draft);

    dw_params  params_;
    dw_stats   stats_{};
    launches   launches_; // when they began
    int64_t    n_exact_before_ = 0;
    open_round round_;

    int32_t n_past_    = 0;
    int32_t gap_       = 0;     // positions before n_past_ that an image spans beyond its cells
    int32_t n_enough_  = 0;     // best tokens of a row that the request's sampler decides among; 0: all are needed
    bool    scheduled_ = false; // the round's tokens are a benchmark's (next_scheduled)
    bool    lost_      = false; // what the memory holds is unknown until reset

    static constexpr int32_t cost_of_a_step  = 32;             // rounds that gain as much, or more
    int32_t                  step_credit_    = cost_of_a_step; // under 0: no step is queued
    int64_t                  n_dropped_seen_ = 0;              // of the counter; by the newest verify or commit
    bool                     took_step_      = false;          // the newest verify was a step that had been queued

    checkpoints checkpoints_;
    // After the state above: from here on the context calls on_flush().
    draftwood::sequence sequence_;
    draftwood::drafting drafting_;
};

// Runs what changes the context's memory: if it stops half-way, nobody knows what the memory holds.
template <typename F> void session::changing(F change) {
    lost_ = true;
    change();
    lost_ = false;
}

} // namespace draftwood
