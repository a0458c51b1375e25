// What the round asks of a drafter. A drafter never decides about text: wrong drafts cost time only.

#pragma once

#include "llama.h"

#include <vector>

namespace draftwood {

class drafter {
  public:
    virtual ~drafter() = default;

    // tokens i32[n_tokens] were evaluated in the target's last decode and are kept at positions pos..
    virtual void observe(const llama_token * tokens, int32_t n_tokens, llama_pos pos) = 0;

    // append up to max_draft tokens that may follow `last`, the token at `pos` which the target has not seen.
    // Returns false if it lacks what it needs here (such as the target's hidden state at pos - 1).
    virtual bool draft(llama_token last, llama_pos pos, int32_t max_draft, float p_min,
                       std::vector<llama_token> & out) = 0;

    // the sequence was cut to n_keep positions
    virtual void trim(llama_pos n_keep) = 0;

    virtual void reset() = 0;
};

} // namespace draftwood
