// Time spent in a scope. Test: tests/model/engine/test_rounds.py.

#pragma once

#include "ggml.h"

#include <cstdint>

namespace draftwood {

// adds the time of its scope to a counter of microseconds
class timer {
  public:
    explicit timer(int64_t & sum) :
        sum_(sum),
        start_(ggml_time_us()) {}
    ~timer() { sum_ += ggml_time_us() - start_; }

  private:
    int64_t & sum_;
    int64_t   start_;
};

} // namespace draftwood
