// Plain steps that are queued before their token is known: see session.h and verify/target_context.h.

#include "round/session.h"

namespace draftwood {

// A greedy sampler looks at nothing but a row's best token. The root has its cell already, and its position.
bool session::can_queue_step() const {
    const bool is_greedy = drafting_.is_greedy() && n_enough_ > 0;
    const bool has_room  = positions_left() > 1 && sequence_.context().free_cells(sequence_.id()) > 0;
    return params_.queue_steps && params_.drafter == DW_DRAFTER_NONE && is_greedy && tree().size() == 1 && has_room &&
           sequence_.can_queue_step();
}

bool session::take_step() {
    const bool is_there = sequence_.has_step() && sequence_.context().has_queued() && tree().size() == 1;
    if (!is_there || sequence_.context().left().top(-1).tokens[0] != tree().tokens[0]) {
        return false;
    }
    sequence_.take_step();
    stats_.n_queued_steps++;
    return true;
}

void session::drop_step() {
    stats_.n_dropped_steps += sequence_.has_step() ? 1 : 0;
    sequence_.drop_step();
}

} // namespace draftwood
