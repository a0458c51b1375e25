// Plain steps that are queued before their token is known: see session.h and verify/target_context.h.

#include "round/session.h"

#include <algorithm>

namespace draftwood {

// A greedy sampler looks at nothing but a row's best token. The root has its cell already, and its position.
bool session::can_queue_step() const {
    const bool plain_comes = params_.drafter == DW_DRAFTER_NONE || drafting_.plain_step_comes();
    const bool is_greedy   = drafting_.is_greedy() && n_enough_ == 1;
    const bool has_room    = positions_left() > 1 && sequence_.context().free_cells(sequence_.id()) > 0;
    return params_.queue_steps && step_credit_ >= 0 && plain_comes && is_greedy && tree().size() == 1 && has_room &&
           sequence_.context().can_queue_step(sequence_.id());
}

void session::queue_step() {
    sequence_.context().queue_step({ sequence_.id(), sequence_.end() }, stats_.n_dropped_steps);
}

// A step that is not taken costs its time. So a text waits for a while that takes other tokens than the best, or beside
// which others decode.
bool session::take_step() {
    const bool is_plain  = tree().size() == 1;
    const bool was_there = sequence_.has_step();
    took_step_           = is_plain && sequence_.context().take_step(sequence_.id(), tree().tokens[0]);
    const bool is_lost   = (is_plain && was_there && !took_step_) || stats_.n_dropped_steps > n_dropped_seen_;
    step_credit_         = is_lost ? step_credit_ - cost_of_a_step : std::min(step_credit_ + 1, cost_of_a_step);
    stats_.n_queued_steps += took_step_ ? 1 : 0;
    return took_step_;
}

} // namespace draftwood
