// How the scheduler's inputs reach a device while a decode of ours runs: a function that takes the place of its
// blocking copy. Compiled inside ggml-base, which knows nothing of llama.cpp; set by hooks.cpp.

#pragma once

#include "ggml-backend.h"

#ifdef __cplusplus
extern "C" {
#endif

// Copy `input`, in host memory, to `copy` on the device of `backend`, in its stream; false: it was not done.
typedef bool (*dw_input_copier)(void * user, ggml_backend_t backend, const struct ggml_tensor * input,
                                struct ggml_tensor * copy);

// for the graphs that this thread computes from now on; copier NULL: the scheduler's own way
GGML_API void dw_set_input_copier(dw_input_copier copier, void * user);

// ggml_backend_sched_compute_splits, before an input of the user is copied
bool dw_sched_copy_input(ggml_backend_t backend, const struct ggml_tensor * input, struct ggml_tensor * copy);

#ifdef __cplusplus
}
#endif
