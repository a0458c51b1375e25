// N-gram drafting (prompt lookup): where the last tokens occurred before in the text, what followed them is the draft.
// Needs no model; works wherever rejected drafts can be taken back.

#pragma once

#include "drafters/drafter.h"

namespace draftwood {

// Test: tests/model/test_ngram.py.
class ngram_drafter : public drafter {
  public:
    // tokens that must match: shorter matches say little and cost a verify
    static constexpr int32_t min_match = 3;
    // matches longer than this are equally good: the newest wins
    static constexpr int32_t max_match = 32;

    // matches that a tree goes on from
    static constexpr int32_t max_branches = 4;

    void         observe(const kept_rows & kept) override;
    draft_result draft(const draft_request & request, token_tree & tree) override;
    void         trim(llama_pos n_keep) override;
    void         reset() override { text_.clear(); }

  private:
    void follow(int32_t next, int32_t depth, float log_prob, token_tree & tree) const;

    std::vector<llama_token> text_; // by position; LLAMA_TOKEN_NULL where others put something else
};

} // namespace draftwood
