// What the round asks of a drafter. A drafter never decides about text: wrong drafts cost time only.

#pragma once

#include "draftwood.h"

#include <memory>
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

    // What the drafter knows at position `pos`, the end of what was observed, beside what trim() leaves; and back to
    // it, after a trim to `pos`. Most know nothing more.
    virtual std::vector<float> mark(llama_pos) const { return {}; }
    virtual void               resume(llama_pos, const std::vector<float> &) {}
};

// The drafter that `params` names, for `target`, which was made with `context_params`; nullptr for DW_DRAFTER_NONE.
// Throws failure where the model has none, or the file does not fit.
std::unique_ptr<drafter> make_drafter(llama_context * target, const llama_context_params & context_params,
                                      const dw_params & params);

} // namespace draftwood
