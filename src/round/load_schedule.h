// Which rounds are run at load to measure the cost curve: plain steps, the longest draft, then drafts of 1, 3 and 7.
// Each size has its warm-up rounds, one more for drafts, and then up to three timed rounds.
// Timed rounds have a budget of 300 ms. Warm-up rounds do not count: on a GPU they load kernels. Past the budget a size
// ends after one timed round, and only plain steps and the longest draft are measured at all.
// Within the budget a plain step ends the schedule. If it is much faster than the first ones, another program had the
// machine meanwhile, and all sizes are measured once more. A program that begins meanwhile is not noticed.
// Plain arithmetic. Must not know: engines, models. Test: tests/unit/test_cost_curve.py.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace draftwood {

class load_schedule {
  public:
    load_schedule(int32_t longest_draft, int32_t n_warmup);

    bool    is_done() const { return is_done_; }
    int32_t n_tokens() const { return index_ < sizes_.size() ? sizes_[index_] : 0; } // of the next draft; 0: plain

    // Count a round, which took this many microseconds. Returns true if it was the last one of its size.
    bool add_round(int64_t us);

  private:
    bool add_last_round(int64_t us);

    std::vector<int32_t> sizes_;
    int32_t              n_warmup_;
    size_t               index_     = 0; // of the size; behind the last one: the plain step at the end
    int32_t              n_round_   = 0; // of the size
    int64_t              timed_us_  = 0;
    int64_t              plain_us_  = 0; // fastest plain step of the first ones
    bool                 is_repeat_ = false;
    bool                 is_done_   = false;
};

} // namespace draftwood
