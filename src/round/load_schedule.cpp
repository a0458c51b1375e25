// See load_schedule.h.

#include "round/load_schedule.h"

#include <algorithm>

namespace draftwood {

namespace {

constexpr int64_t budget_us  = 300 * 1000; // of timed rounds
constexpr int32_t n_timed    = 3;          // rounds of a size
constexpr size_t  n_required = 2;          // sizes that are measured past the budget too
constexpr double  quieter    = 0.7;        // of the first plain steps: the machine was busy when they ran

} // namespace

load_schedule::load_schedule(int32_t longest_draft, int32_t n_warmup) :
    sizes_{ 0, longest_draft },
    n_warmup_(n_warmup) {
    for (const int32_t n : { 1, 3, 7 }) {
        if (n < longest_draft) {
            sizes_.push_back(n);
        }
    }
}

bool load_schedule::add_round(int64_t us) {
    if (index_ == sizes_.size()) {
        return add_last_round(us);
    }
    const int32_t n_untimed = n_warmup_ + (n_tokens() > 0 ? 1 : 0); // the drafter's catch-up is not a draft's time
    const bool    is_timed  = n_round_ >= n_untimed;
    if (is_timed && index_ == 0) {
        plain_us_ = plain_us_ > 0 ? std::min(plain_us_, us) : us;
    }
    timed_us_ += is_timed ? us : 0;
    n_round_++;
    const bool is_last = n_round_ == n_untimed + n_timed || (is_timed && timed_us_ > budget_us);
    if (is_last) {
        index_++;
        n_round_ = 0;
        is_done_ = (index_ >= n_required && timed_us_ > budget_us) || (index_ == sizes_.size() && is_repeat_);
    }
    return is_last;
}

bool load_schedule::add_last_round(int64_t us) {
    is_done_   = (double) us > quieter * (double) plain_us_;
    is_repeat_ = true;
    index_     = 0;
    timed_us_  = 0;
    return true;
}

} // namespace draftwood
