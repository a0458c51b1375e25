// How often drafts are accepted. Older rounds weigh less.
// Plain arithmetic. Must not know: times, engines. Test: tests/unit/test_cost_model.py.

#pragma once

#include "tree/token_tree.h"

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

    // Reduces the weight of past rounds, because the text may have changed. The rates stay.
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

} // namespace draftwood
