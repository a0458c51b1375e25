// How often drafts are accepted, and when a drafter that does not pay is tried again. Older rounds weigh less.
// Plain arithmetic. Must not know: times, engines. Test: tests/unit/test_cost_model.py.

#pragma once

#include "tree/token_tree.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace draftwood {

// Acceptance by depth of one source of drafts.
class acceptance_record {
  public:
    static constexpr int32_t max_draft = max_tree_nodes - 1;

    // A round judged the first n_judged tokens of a draft, and accepted the first n_accepted of these. first: depth of
    // the first one, more than 0 if tokens before the draft count as accepted ones.
    void add(int32_t n_judged, int32_t n_accepted, int32_t first);

    // What is known weighs as few rounds from now on: the text may have changed. Rates stay as they are.
    void forget();

    // Probability that the token at this depth, 0 the first, is accepted if those before it are.
    double rate(int32_t depth) const;

    // Expected tokens of a round with a draft of n tokens from this depth on, the bonus token included.
    double expected_tokens(int32_t n, int32_t first) const;

  private:
    std::array<double, max_draft + 1> reached_{}; // by depth
    std::array<double, max_draft + 1> accepted_{};
};

// How often branches are accepted, against the drafter's probabilities.
class branch_record {
  public:
    // A round had branches with these probabilities, of which n_accepted were accepted.
    void add(const std::vector<double> & probabilities, int32_t n_accepted);

    // Accepted branches over the sum of their probabilities; 1 before the first round.
    double ratio() const;

  private:
    double expected_ = 0.0;
    double accepted_ = 0.0;
};

// When a drafter that is not chosen gets a trial of a few rounds, since the text may have changed: after more rounds
// than first_pause, then twice as many, up to last_pause. Each round that chooses the drafter takes first_pause off,
// down to the first one: where it is chosen now and then its acceptance is known, and a trial is no use.
class trial_schedule {
  public:
    // first_pause, last_pause, n_trial: rounds
    trial_schedule(int32_t first_pause, int32_t last_pause, int32_t n_trial) :
        first_pause_(first_pause),
        last_pause_(last_pause),
        n_trial_(n_trial) {}

    // Count a round. Returns true if it is a trial, which ends where the drafter is chosen.
    // is_available: the drafter could draft in this round. Other rounds do not count.
    // least_pause: rounds that pay for a trial.
    bool next_round(bool is_chosen, bool is_available, int32_t least_pause = 0);

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
