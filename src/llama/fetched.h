// Values of a tensor on their way to host memory that its device writes by itself: queued behind what computes them,
// they are there as soon as that is done. On a CPU they are copied at once.
// Must not know: what they mean. Test: tests/model/engine/test_results.py, tests/gpu/test_same_text.py.

#pragma once

#include "ggml-cpp.h"
#include "llama/fence.h"
#include "llama/row_copies.h"

namespace draftwood {

class fetched_values {
  public:
    fetched_values() = default;
    ~fetched_values() { wait(); }
    fetched_values(const fetched_values &)             = delete;
    fetched_values & operator=(const fetched_values &) = delete;

    // Queues the tensor's first n bytes on `backend`. copies: of its device, or nullptr. A kernel writes pinned memory
    // in 2 us, where the copy engine and what follows it wait 8 us each for the other to end. Throws failure.
    void ask(ggml_backend_t backend, row_copies copies, const ggml_tensor * from, size_t n_bytes);

    bool is_asked() const { return is_asked_; }
    void forget() { is_asked_ = false; }

    // What was asked for last, until the next ask(). Waits until it is there, and not for what was queued since.
    const void * get();

  private:
    void wait();

    bool                    is_asked_ = false;
    ggml_backend_t          writer_   = nullptr; // may still write into the buffer; nullptr: none does
    fence                   there_;
    ggml_backend_buffer_ptr buffer_;
};

} // namespace draftwood
