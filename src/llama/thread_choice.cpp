// See thread_choice.h.

#include "llama/thread_choice.h"

#include <algorithm>

namespace draftwood {

namespace {

constexpr int64_t n_before_trial = 4;  // timed verifies of a size: those of model loading are no trials
constexpr int32_t n_needed_wins  = 2;  // trials in a row, each followed by `soon` other verifies
constexpr int32_t soon           = 4;  // verifies
constexpr int32_t first_interval = 64; // verifies between trials
constexpr int32_t last_interval  = 1024;
constexpr double  faster         = 0.95; // a difference that is no noise
constexpr double  much_slower    = 1.5;  // no early trial, and none for larger sizes, which have more work to share

} // namespace

double thread_choice::size::median() const {
    std::array<double, n_recent> sorted  = recent;
    const auto                   n_known = (int32_t) std::min<int64_t>(n_times, n_recent);
    std::sort(sorted.begin(), sorted.begin() + n_known);
    return n_known == 0 ? 0.0 : sorted[n_known / 2];
}

// The first trial comes at once, later ones after the interval. The newest trial may be old: if the chosen count has
// become slower than it was, another one says whether both have.
bool thread_choice::wants_trial(int32_t n_rows) const {
    const size & it = sizes_[n_rows];
    if (it.n_times < n_before_trial) {
        return false;
    }
    const auto is_clear = [](const size & each) { return each.is_clear && each.chosen == n_threads_batch; };
    if (it.trial_us == 0.0) {
        const double least = *std::min_element(it.recent.begin(), it.recent.begin() + n_before_trial);
        return it.median() > much_slower * least || std::none_of(sizes_.begin(), sizes_.begin() + n_rows, is_clear);
    }
    const bool has_crossed = it.trial_us < faster * it.median() && it.n_verifies >= soon;
    return has_crossed || it.n_verifies >= it.interval;
}

thread_count thread_choice::choose(int32_t n_rows) {
    n_rows_         = std::clamp(n_rows, 1, max_rows);
    is_trial_       = wants_trial(n_rows_);
    const size & it = sizes_[n_rows_];
    return is_trial_ ? it.other() : it.chosen;
}

void thread_choice::judge_trial(size & it, double us) {
    const double now = it.median();
    it.trial_us      = us;
    it.n_verifies    = 0;
    it.is_clear      = us > much_slower * now;
    it.n_wins        = us < faster * now ? it.n_wins + 1 : 0;
    if (it.n_wins == n_needed_wins) {
        it.chosen   = it.other();
        it.trial_us = now;
        it.n_times  = 0;
        it.n_wins   = 0;
        it.interval = first_interval;
    } else if (it.n_wins > 0) {
        it.interval = soon;
    } else {
        it.interval = it.is_clear ? last_interval : std::clamp(2 * it.interval, first_interval, last_interval);
    }
}

bool thread_choice::add_time(int64_t us) {
    size & it = sizes_[n_rows_];
    if (is_trial_) {
        judge_trial(it, (double) us);
        return false;
    }
    if (it.is_warm) {
        it.recent[it.n_times++ % n_recent] = (double) us;
        it.n_verifies++;
    }
    it.is_warm = true;
    return true;
}

} // namespace draftwood
