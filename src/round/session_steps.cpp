// Plain steps that are queued before their token is known: see session.h and verify/target_context.h.

#include "round/session.h"

namespace draftwood {

// A greedy sampler looks at nothing but a row's best token. The root has its cell already, and its position.
bool session::can_queue_step() const {
    const bool is_greedy = drafting_.is_greedy() && n_enough_ == 1;
    const bool has_room  = positions_left() > 1 && sequence_.context().free_cells(sequence_.id()) > 0;
    return params_.queue_steps && drafting_.plain_step_comes() && is_greedy && tree().size() == 1 && has_room &&
           sequence_.context().can_queue_step(sequence_.id());
}

void session::queue_step() {
    sequence_.context().queue_step({ sequence_.id(), sequence_.end() }, stats_.n_dropped_steps);
}

bool session::take_step() {
    const bool taken = tree().size() == 1 && sequence_.context().take_step(sequence_.id(), tree().tokens[0]);
    stats_.n_queued_steps += taken ? 1 : 0;
    return taken;
}

} // namespace draftwood
