// What belongs to a llama_model while engines use it, and is shared by all contexts on it: the budget of memory, and
// those who want to hear what was accepted. An expert pool joins here: experts are the model's, not a context's.
// Must not know: rounds, drafters, samplers. Calls on contexts of one model must not overlap.
// Test: tests/model/engine/test_shared_context.py.

#pragma once

#include "llama.h"
#include "llama/device_budget.h"

#include <memory>
#include <vector>

namespace draftwood {

// Rows of a context's last decode whose tokens stay: tokens i32[n] at positions pos.., computed in rows i32[n].
struct accepted_rows {
    const llama_context * ctx;
    llama_seq_id          seq;
    const llama_token *   tokens;
    const int32_t *       rows;
    int32_t               n;
    llama_pos             pos;
};

class accepted_observer {
  public:
    virtual ~accepted_observer() = default;

    // A round was committed. The rows' results are still where the decode left them.
    virtual void on_accepted(const accepted_rows & rows) noexcept = 0;
};

class model_attachment {
  public:
    // the one of `model`, made for the first context on it and gone with the last that holds it
    static std::shared_ptr<model_attachment> of(const llama_model * model);

    device_budget & budget() { return budget_; }

    // An observer must be removed before it goes.
    void add(accepted_observer & observer) { observers_.push_back(&observer); }
    void remove(const accepted_observer & observer) noexcept;
    void accepted(const accepted_rows & rows) const noexcept;

  private:
    device_budget                    budget_;
    std::vector<accepted_observer *> observers_;
};

} // namespace draftwood
