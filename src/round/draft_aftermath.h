// How long ago the drafter drafted, and what follows from it on a CPU. The round behind a draft finds its weights gone
// from the caches. A draft behind other rounds finds the drafter's gone, and must read the tokens of these rounds.
// Plain arithmetic. Must not know: curves, engines. Test: tests/unit/test_draft_aftermath.py.

#pragma once

#include <algorithm>
#include <cstdint>

namespace draftwood {

class draft_aftermath {
  public:
    // the text grew by n tokens, in a round or by a prompt
    void add_tokens(int32_t n) { n_tokens_ += std::min(n, most_tokens + 1 - n_tokens_); }

    // A round has ended. drafted: by the drafter.
    void end_round(bool drafted) {
        is_behind_draft_ = drafted;
        n_tokens_        = drafted ? 0 : n_tokens_;
    }

    // no round came between the newest draft and now
    bool is_behind_draft() const { return is_behind_draft_; }

    // A draft first catches up with the tokens since the last one. Behind a prompt or a pause its time says nothing of
    // drafts.
    bool catches_up() const { return n_tokens_ > most_tokens; }

    // A round behind a draft took `us`, and such rounds take `expected`.
    void add_excess(double us, double expected) {
        const double excess = std::clamp(us / expected - 1.0, -most_excess, most_excess);
        mean_ += weight_of_newest * (excess * expected - mean_);
    }

    // A draft behind another round than a draft's took `us`, and one behind a draft's takes `expected`.
    void add_return(double us, double expected) {
        const double excess = std::clamp(us - expected, -expected, most_of_return * expected);
        return_mean_ += weight_of_return * (excess - return_mean_);
    }

    // microseconds that a draft costs the round behind it
    double cost() const { return std::max(0.0, mean_); }

    // microseconds that the next draft takes longer than one behind a draft
    double cost_of_return() const { return is_behind_draft_ ? 0.0 : std::max(0.0, return_mean_); }

  private:
    static constexpr int32_t most_tokens      = 64; // of rounds by n-grams between two drafts, whose catching up counts
    static constexpr double  most_excess      = 0.2;  // of a round: what is more has other reasons
    static constexpr double  weight_of_newest = 0.05; // single rounds differ by more than the mean
    static constexpr double  most_of_return   = 3.0;  // of a draft: a small drafter's decode of tokens takes as long
    static constexpr double  weight_of_return = 0.1;  // there are few, and they differ less from draft to draft

    bool    is_behind_draft_ = false;
    int32_t n_tokens_        = 0;
    double  mean_            = 0.0;
    double  return_mean_     = 0.0;
};

} // namespace draftwood
