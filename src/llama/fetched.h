// Values of a tensor on their way to host memory that its device writes by itself: queued behind what computes them,
// they are there as soon as that is done, and no copy waits for another one. On a CPU they are copied at once.
// Must not know: what they mean. Test: tests/model/engine/test_results.py, tests/gpu/test_same_text.py.

#pragma once

#include "ggml-cpp.h"

namespace draftwood {

class fetched_values {
  public:
    // Queues the tensor's first n bytes on `backend`. Throws failure.
    void ask(ggml_backend_t backend, const ggml_tensor * from, size_t n_bytes);

    bool is_asked() const { return backend_ != nullptr; }
    void forget() { backend_ = nullptr; }

    // What was asked for last, until the next ask(); waits until `backend` has done all that is queued there.
    const void * get();

  private:
    ggml_backend_t          backend_ = nullptr;
    bool                    is_here_ = false;
    ggml_backend_buffer_ptr buffer_;
};

} // namespace draftwood
