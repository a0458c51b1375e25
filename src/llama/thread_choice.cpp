// See thread_choice.h.

#include "llama/thread_choice.h"

#include <algorithm>

namespace draftwood {

namespace {

constexpr int32_t n_before_trial = 2;  // timed verifies of a size
constexpr int32_t first_interval = 64; // verifies between trials
constexpr int32_t soon           = 4;  // after a trial that was faster than the chosen threads' median
constexpr int32_t last_interval  = 1024;
constexpr double  faster         = 0.95; // a difference that is no noise
constexpr double  clearly_slower = 1.5;  // larger sizes need no trial of their own
constexpr double  slowed_down    = 1.67; // another program has the cores

} // namespace

void thread_choice::times::add(double us) {
    recent[n % n_recent] = us;
    least                = n == 0 ? us : std::min(least, us);
    n++;
}

double thread_choice::times::median() const {
    std::array<double, n_recent> sorted  = recent;
    const int32_t                n_known = std::min(n, n_recent);
    std::sort(sorted.begin(), sorted.begin() + n_known);
    return n_known == 0 ? 0.0 : sorted[n_known / 2];
}

// Whether plain steps' threads were clearly slower for fewer rows, which have less work to share.
bool thread_choice::is_settled_below(int32_t n_rows) const {
    return std::any_of(sizes_.begin(), sizes_.begin() + n_rows, [](const size & each) {
        return each.chosen == of_prompts && each.on[of_steps].n > 0 &&
               each.on[of_steps].median() > clearly_slower * each.on[of_prompts].median();
    });
}

bool thread_choice::wants_trial(int32_t n_rows) const {
    const size &  it  = sizes_[n_rows];
    const times & now = it.on[it.chosen];
    if (!it.is_warm || now.n < n_before_trial) {
        return false;
    }
    if (it.interval == 0) {
        return !is_settled_below(n_rows) || now.median() > slowed_down * now.least;
    }
    return it.n_verifies >= it.interval;
}

verify_threads thread_choice::choose(int32_t n_rows) {
    n_rows_         = std::clamp(n_rows, 0, DW_MAX_TREE);
    const size & it = sizes_[n_rows_];
    runs_on_        = wants_trial(n_rows_) ? it.other() : it.chosen;
    return runs_on_;
}

bool thread_choice::add_time(int64_t us) {
    size & it = sizes_[n_rows_];
    if (!it.is_warm) {
        it.is_warm = true;
        return true;
    }
    const bool is_trial = runs_on_ != it.chosen;
    it.on[runs_on_].add((double) us);
    it.n_verifies       = is_trial ? 0 : it.n_verifies + 1;
    const times & other = it.on[it.other()];
    if (other.n > 0 && other.median() < faster * it.on[it.chosen].median()) {
        it.chosen     = it.other();
        it.interval   = first_interval;
        it.n_verifies = 0;
    } else if (is_trial && (double) us < faster * it.on[it.chosen].median()) {
        it.interval = soon; // the median follows, if it was no chance
    } else if (is_trial) {
        it.interval = std::clamp(2 * it.interval, first_interval, last_interval);
    }
    return !is_trial;
}

} // namespace draftwood
