// See acceptance.h.

#include "round/acceptance.h"

#include <algorithm>

namespace draftwood {

namespace {

constexpr double decay        = 0.98; // weight of a round against the one after it
constexpr double prior_rate   = 0.75; // acceptance before anything is known
constexpr double prior_count  = 2.0;  // tokens that the prior stands for
constexpr double branch_prior = 2.0;  // branches, accepted as often as expected
constexpr double most_old     = 4.0;  // forget() counts past rounds as at most this many

} // namespace

void acceptance_record::add(int32_t n_judged, int32_t n_accepted, int32_t first) {
    const int32_t end = std::min(first + std::min(n_judged, n_accepted + 1), max_draft + 1);
    for (int32_t depth = first; depth < end; ++depth) {
        reached_[depth]  = decay * reached_[depth] + 1.0;
        accepted_[depth] = decay * accepted_[depth] + (depth < first + n_accepted ? 1.0 : 0.0);
    }
}

void acceptance_record::forget() {
    for (size_t depth = 0; depth < reached_.size(); ++depth) {
        const double stays = rate((int32_t) depth);
        reached_[depth]    = std::min(reached_[depth], most_old);
        accepted_[depth]   = stays * (reached_[depth] + prior_count) - prior_rate * prior_count;
    }
}

double acceptance_record::rate(int32_t depth) const {
    const int32_t at = std::min(depth, max_draft);
    return (accepted_[at] + prior_rate * prior_count) / (reached_[at] + prior_count);
}

double acceptance_record::expected_tokens(int32_t n, int32_t first) const {
    double expected = 1.0;
    double path     = 1.0;
    for (int32_t depth = 0; depth < n; ++depth) {
        path *= rate(first + depth);
        expected += path;
    }
    return expected;
}

void branch_record::add(const std::vector<double> & probabilities, int32_t n_accepted) {
    expected_ *= decay;
    accepted_ = decay * accepted_ + n_accepted;
    for (const double each : probabilities) {
        expected_ += each;
    }
}

double branch_record::ratio() const {
    return (accepted_ + branch_prior) / (expected_ + branch_prior);
}

} // namespace draftwood
