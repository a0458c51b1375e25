// How much time a drafter may take to catch up with a prompt or a pause before it is known to pay.
// Plain arithmetic. Must not know: curves, engines. Test: tests/unit/test_draft_aftermath.py.

#pragma once

#include <algorithm>

namespace draftwood {

// All times are microseconds. Older rounds weigh less.
class catch_up_budget {
  public:
    // Records a draft that spent `us` extra on catching up. 16 rounds that use the drafter pay it off.
    void add_catch_up(double us) {
        wasted_ += not_earned_;
        not_earned_ = std::max(0.0, us);
        of_a_round_ = not_earned_ / rounds_that_earn;
    }

    void add_draft(double us) { all_ += us; }

    // drafted: by the drafter
    void add_round(bool drafted, double us) {
        not_earned_ = std::max(0.0, not_earned_ - (drafted ? of_a_round_ : 0.0));
        wasted_ *= weight_of_older;
        all_ = weight_of_older * all_ + us;
    }

    // True while catch-up time that was not paid off is at most 0.5 % of recent time.
    bool is_left() const { return wasted_ + not_earned_ <= most_of_all * all_; }

  private:
    static constexpr double weight_of_older  = 0.999; // of a round, against the one after it
    static constexpr double most_of_all      = 0.005;
    static constexpr double rounds_that_earn = 16.0;

    double wasted_     = 0.0;
    double not_earned_ = 0.0; // of the newest draft that caught up
    double of_a_round_ = 0.0;
    double all_        = 0.0;
};

} // namespace draftwood
