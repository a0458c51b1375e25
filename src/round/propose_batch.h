// The proposals of several sessions of a llama_context: their lengths are chosen for all of them, and drafters that
// share a context draft together. Must not know: how a drafter drafts, samplers. Test:
// tests/model/engine/test_joint_drafts.py, test_joint_dflash.py, test_batches.py.

#pragma once

#include "round/session.h"

#include <vector>

namespace draftwood {

class propose_batch {
  public:
    // Sessions of one context, each once, with the newest token and the longest draft of each. Throws failure, before
    // anything is changed.
    propose_batch(const std::vector<session *> & sessions, const llama_token * last, const int32_t * wanted);

    // Ends their open rounds and makes a proposal of each. Throws failure.
    void run();

  private:
    struct member {
        session *       who;
        llama_token     last;
        int32_t         wanted;
        bool            has_begun = false; // a round of this call
        draft_limits    limits{};
        drafting::offer offer{};
        bool            is_chosen = false; // its length was chosen for all: n_tokens, a chain
        int32_t         n_tokens  = 0;
    };

    void begin_rounds();
    void choose_lengths();
    void draft();
    void draft_together(std::vector<joint_draft> & drafts);

    std::vector<member> members_; // in the order of their sequences
};

} // namespace draftwood
