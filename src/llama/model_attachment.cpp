// See model_attachment.h.

#include "llama/model_attachment.h"

#include <algorithm>
#include <map>
#include <mutex>

namespace draftwood {

// llama_model offers no place for a pointer of ours, so they are found by address.
std::shared_ptr<model_attachment> model_attachment::of(const llama_model * model) {
    static std::mutex                                                     mutex;
    static std::map<const llama_model *, std::weak_ptr<model_attachment>> known;

    const std::lock_guard<std::mutex> lock(mutex);
    for (auto it = known.begin(); it != known.end();) {
        it = it->second.expired() ? known.erase(it) : std::next(it);
    }
    std::shared_ptr<model_attachment> there = known[model].lock();
    if (!there) {
        there        = std::make_shared<model_attachment>();
        known[model] = there;
    }
    return there;
}

void model_attachment::remove(const accepted_observer & observer) noexcept {
    observers_.erase(std::remove(observers_.begin(), observers_.end(), &observer), observers_.end());
}

void model_attachment::accepted(const accepted_rows & rows) const noexcept {
    for (accepted_observer * each : observers_) {
        each->on_accepted(rows);
    }
}

} // namespace draftwood
