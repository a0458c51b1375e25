// N-gram drafting (prompt lookup): where the last tokens occurred before in the text, what followed them is the draft.
// Needs no model; works wherever rejected drafts can be taken back.

#pragma once

#include "drafter.h"

namespace draftwood {

// Test: tests/model/test_ngram.py.
class ngram_drafter : public drafter {
  public:
    // tokens that must match: shorter matches say little and cost a verify
    static constexpr int32_t min_match = 3;
    // matches longer than this are equally good: the newest wins
    static constexpr int32_t max_match = 32;

    void observe(const llama_token * tokens, int32_t n_tokens, llama_pos pos) override;
    bool draft(llama_token last, llama_pos pos, int32_t max_draft, float p_min,
               std::vector<llama_token> & out) override;
    void trim(llama_pos n_keep) override;
    void reset() override { text_.clear(); }

  private:
    std::vector<llama_token> text_; // by position; LLAMA_TOKEN_NULL where others put something else
};

} // namespace draftwood
