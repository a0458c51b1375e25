// How a scheduler copies the inputs of a graph to a device: a function may take the place of its blocking copy.
// The patched ggml-backend.cpp keeps one dw_sched_inputs in each scheduler, so no thread-local says whose graph runs.
// Compiled inside ggml-base, which knows nothing of llama.cpp. Set by llama/inputs.cpp.
// Test: tests/gpu/test_same_text.py.

#pragma once

#include "ggml-backend.h"

#ifdef __cplusplus
extern "C" {
#endif

// Copies `input`, in host memory, to `copy` on the device of `backend`, in its stream, and when it is asked for the
// last input of the backend's part of a graph at the latest. Returns false if it does not.
typedef bool (*dw_input_copier)(void * user, ggml_backend_t backend, const struct ggml_tensor * input,
                                struct ggml_tensor * copy, bool is_last);

// Zero in a new scheduler: it copies as ggml does.
struct dw_sched_inputs {
    dw_input_copier copier;
    void *          user;
};

// The one in `sched`, to be read and written while the scheduler computes nothing.
GGML_API struct dw_sched_inputs * dw_sched_inputs_of(ggml_backend_sched_t sched);

// ggml_backend_sched_compute_splits calls it before it copies an input.
static inline bool dw_sched_copy_input(const struct dw_sched_inputs * inputs, ggml_backend_t backend,
                                       const struct ggml_tensor * input, struct ggml_tensor * copy, bool is_last) {
    return inputs->copier && inputs->copier(inputs->user, backend, input, copy, is_last);
}

#ifdef __cplusplus
}
#endif
