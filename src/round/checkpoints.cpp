// Places to go back to: see checkpoints.h.

#include "round/checkpoints.h"

#include <algorithm>

namespace draftwood {

bool checkpoints::make_room(size_t n_bytes) {
    if (n_bytes > budget_) {
        return false;
    }
    while (bytes() + n_bytes > budget_) {
        entries_.pop_back();
    }
    return true;
}

void checkpoints::put(checkpoint entry) {
    entries_.push_front(std::move(entry));
}

const checkpoint * checkpoints::find(llama_pos pos) {
    const auto it =
        std::find_if(entries_.begin(), entries_.end(), [&](const auto & entry) { return entry.pos == pos; });
    if (it == entries_.end()) {
        return nullptr;
    }
    entries_.splice(entries_.begin(), entries_, it);
    return &entries_.front();
}

llama_pos checkpoints::reach(llama_pos n_keep) const {
    llama_pos best = 0;
    for (const checkpoint & entry : entries_) {
        best = entry.pos <= n_keep ? std::max(best, entry.pos) : best;
    }
    return best;
}

void checkpoints::drop_beyond(llama_pos n_keep) {
    entries_.remove_if([&](const checkpoint & entry) { return entry.pos > n_keep; });
}

size_t checkpoints::bytes() const {
    size_t sum = 0;
    for (const checkpoint & entry : entries_) {
        sum += entry.bytes();
    }
    return sum;
}

} // namespace draftwood
