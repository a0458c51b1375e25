// See load_schedule.h.

#include "round/load_schedule.h"

namespace draftwood {

namespace {

constexpr int64_t budget_us  = 300 * 1000; // of timed rounds
constexpr int32_t n_timed    = 3;          // rounds of a size
constexpr size_t  n_required = 2;          // sizes that are measured past the budget too

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

bool load_schedule::is_done() const {
    return index_ == sizes_.size() || (index_ >= n_required && timed_us_ > budget_us);
}

bool load_schedule::add_round(int64_t us) {
    const int32_t n_untimed = n_warmup_ + (n_tokens() > 0 ? 1 : 0); // the drafter's catch-up is not a draft's time
    const bool    is_timed  = n_round_ >= n_untimed;
    timed_us_ += is_timed ? us : 0;
    n_round_++;
    const bool is_last = n_round_ == n_untimed + n_timed || (is_timed && timed_us_ > budget_us);
    if (is_last) {
        index_++;
        n_round_ = 0;
    }
    return is_last;
}

} // namespace draftwood
