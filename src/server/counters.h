// Counters of ours in llama-server's /metrics, as Prometheus reads them. Must not know: who counts.
// Test: tests/server/test_pool.py, test_queued_steps.py.

#pragma once

#include "common.h"

#include <cstdint>
#include <string>

namespace draftwood {

inline std::string counter(const char * name, const char * help, int64_t value) {
    return string_format("# HELP llamacpp:%s %s\n# TYPE llamacpp:%s counter\nllamacpp:%s %lld\n", name, help, name,
                         name, (long long) value);
}

inline std::string counters_of_steps(int64_t n_taken, int64_t n_dropped) {
    return counter("queued_steps_total", "Plain steps that were queued before their token was known", n_taken) +
           counter("dropped_steps_total", "Steps that were queued and not taken", n_dropped);
}

} // namespace draftwood
