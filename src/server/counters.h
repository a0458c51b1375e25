// Counters of ours in llama-server's /metrics, as Prometheus reads them. Must not know: what they count.
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

} // namespace draftwood
