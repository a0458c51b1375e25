// Order between the streams of two backends: what was queued on one before record() is done before what is queued on
// the other after wait(), or before wait() returns where that is a CPU. CPUs compute as they are called and record
// nothing. Test: tests/gpu/test_same_text.py.

#pragma once

#include "ggml-cpp.h"

namespace draftwood {

class fence {
  public:
    void record(ggml_backend_t backend) {
        if (!event_) {
            event_.reset(ggml_backend_event_new(ggml_backend_get_device(backend)));
        }
        if (event_) {
            ggml_backend_event_record(event_.get(), backend);
        }
    }

    // no effect before the first record()
    void wait(ggml_backend_t backend) const {
        if (event_ && ggml_backend_dev_type(ggml_backend_get_device(backend)) != GGML_BACKEND_DEVICE_TYPE_CPU) {
            ggml_backend_event_wait(backend, event_.get());
        } else if (event_) {
            ggml_backend_event_synchronize(event_.get());
        }
    }

    // The host waits for what was queued before the newest record(). False: nothing was recorded.
    bool wait_on_host() const {
        if (event_) {
            ggml_backend_event_synchronize(event_.get());
        }
        return event_ != nullptr;
    }

  private:
    ggml_backend_event_ptr event_;
};

} // namespace draftwood
