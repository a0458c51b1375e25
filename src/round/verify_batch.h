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

    // Decodes all of them. With too little memory for so many rows, with as many as there is memory for.
    // Throws failure.
    void run();

  private:
    bool             alone() const { return sessions_.size() == 1; }
    target_context & context() const { return sessions_[0]->target().context(); }
    int32_t          rows_wanted() const;
    int32_t          make_room(int32_t n_rows);
    bool             attempt();
    bool             failed(dw_status code, int32_t n_rows);

    std::vector<session *> sessions_; // in the order of their sequences
};

} // namespace draftwood
