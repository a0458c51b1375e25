// What lies in llama-server's queue of tasks. While a batch is decoded, a second thread answers what only reads the
// server's state (metrics, slots). Upstream wakes it for each batch and waits for it behind each, which takes three
// changes of threads a token. Patched lines of server-queue.cpp wake it for tasks that come from outside, which this
// tells from the server's own. Must not know: slots, requests. Test: tests/server/test_threads.py.

#pragma once

#include <algorithm>

namespace draftwood {

// Whether one of `tasks` is of another type than `own`.
template <typename Tasks, typename Type> bool has_other_than(const Tasks & tasks, Type own) {
    return std::any_of(tasks.begin(), tasks.end(), [own](const auto & task) { return task.type != own; });
}

} // namespace draftwood
