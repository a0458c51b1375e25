// The proposals of one or several sessions of a llama_context, verified in one decode. Queries change nothing; run()
// is the one command. Must not know: drafters, samplers.
// Test: tests/model/engine/test_sequences.py, test_shared_context.py.

#pragma once

#include "round/session.h"

#include <vector>

namespace draftwood {

class verify_batch {
  public:
    // Sessions of one context, each once, all with a proposal. Throws failure with DW_ERR_STATE or DW_ERR_ARGUMENT.
    explicit verify_batch(std::vector<session *> sessions);

    // Decodes all of them; or, for a single session whose step is queued, takes that. With too little memory for so
    // many rows, with as many as there is memory for. Throws failure.
    void run();

    // What rounds together take; those of a session alone, of one that knows them if there is one.
    batch_model &      together() const { return sessions_[0]->drafting().together(); }
    const cost_model & solo() const;
    // Expected microseconds of a verify with so many rows of each session, in the order of their sequences; 0: unknown.
    double expected_time(const std::vector<int32_t> & rows) const;

  private:
    // sessions that share a graph, as many rows each
    struct group {
        std::vector<session *> members;
        int32_t                n_rows;
        bool                   on_trees;
    };

    bool             alone() const { return sessions_.size() == 1; }
    target_context & context() const { return sessions_[0]->sequence().context(); }
    int32_t          rows_that_fit() const;
    bool             can_join(const group & group, const session & next, bool checks_states) const;
    // of graphs: expected microseconds, 0 if not known; and in rows, before anything is known
    struct duration {
        double micros, rows;
    };
    duration time_of(const std::vector<group> & groups) const;

    std::vector<group> lay_out(const std::vector<int32_t> & rows, int32_t most_of_small, bool checks_states) const;
    std::vector<group> fastest_layout(const std::vector<int32_t> & rows, bool checks_states) const;
    std::vector<group> plan() const;
    std::vector<group> plan_with_room();
    bool               attempt();
    bool               take_step();
    int64_t            finish();
    void               verified(const std::vector<group> & groups, int64_t took);
    void               learn(const std::vector<group> & groups, int64_t took);
    bool               failed(dw_status code, const std::vector<group> & groups);

    std::vector<session *> sessions_;               // in the order of their sequences
    bool                   waits_for_step_ = false; // that was dropped and is still computed
};

} // namespace draftwood
