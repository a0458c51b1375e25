// When a drafter that is not chosen is tried again, since the text may have changed.
// Plain arithmetic. Must not know: times, acceptance. Test: tests/unit/test_cost_model.py.

#pragma once

#include <algorithm>
#include <cstdint>

namespace draftwood {

struct trial_rules {
    int32_t first_pause, last_pause; // rounds until the first trial, and until later ones
    int32_t n_rounds;                // of a trial
    int32_t n_tokens;                // that a round of it drafts
    int32_t n_plain;                 // plain steps in a row among drafts
    double  time;                    // most part of the time that trials may take; 0: any
};

// A drafter's first round on a CPU catches up, for the time of several steps, and is no time of a draft; and a plain
// step behind a draft is slow.
constexpr trial_rules trials_on_cpu{ 64, 1024, 2, 2, 2, 0.0 };
// A verify that copies missing experts may take twice a plain step, so a trial is short, and goes on while drafts are
// accepted.
constexpr trial_rules trials_on_gpu{ 16, 512, 1, 1, 1, 0.005 };

// When a drafter that is not chosen gets a trial of a few rounds, since the text may have changed: after more rounds
// than first_pause, then twice as many, up to last_pause. Each round that chooses the drafter takes first_pause off,
// down to the first one: where it is chosen now and then its acceptance is known, and a trial is no use.
class trial_schedule {
  public:
    explicit trial_schedule(const trial_rules & rules) :
        trial_schedule(rules.first_pause, rules.last_pause, rules.n_rounds) {}

    // first_pause, last_pause, n_trial: rounds
    trial_schedule(int32_t first_pause, int32_t last_pause, int32_t n_trial) :
        first_pause_(first_pause),
        last_pause_(last_pause),
        n_trial_(n_trial) {}

    // Count a round. Returns true if it is a trial, which ends where the drafter is chosen.
    // is_available: the drafter could draft in this round. Other rounds do not count.
    // least_pause: rounds that pay for a trial.
    bool next_round(bool is_chosen, bool is_available, int32_t least_pause = 0);

    // whether the next round is one, if the drafter is not chosen then
    bool is_next(bool is_available, int32_t least_pause = 0) const {
        return is_available && (n_left_ > 0 || n_idle_ + 1 > std::max(pause_, least_pause));
    }

    // The trial has another round.
    void extend() { n_left_ = std::max(n_left_, 1); }

  private:
    int32_t first_pause_;
    int32_t last_pause_;
    int32_t n_trial_;
    int32_t n_idle_ = 0;
    int32_t pause_  = first_pause_;
    int32_t n_left_ = 0; // rounds of the trial
};

} // namespace draftwood
