// See trials.h.

#include "round/trials.h"

namespace draftwood {

bool trial_schedule::next_round(bool is_chosen, bool is_available, int32_t least_pause) {
    if (is_chosen) {
        n_left_ = 0;
        n_idle_ = 0;
        pause_  = std::max(first_pause_, pause_ - first_pause_);
    } else if (is_available && ++n_idle_ > std::max(pause_, least_pause)) {
        n_idle_ = 0;
        pause_  = std::min(2 * pause_, last_pause_);
        n_left_ = n_trial_;
    }
    if (is_available && n_left_ > 0) {
        n_left_--;
        return true;
    }
    return false;
}

} // namespace draftwood
