// See sched-inputs.h.

#include "hooks/sched-inputs.h"

namespace {

thread_local dw_input_copier current = nullptr;
thread_local void *          owner   = nullptr;

} // namespace

void dw_set_input_copier(dw_input_copier copier, void * user) {
    current = copier;
    owner   = user;
}

bool dw_sched_copy_input(ggml_backend_t backend, const ggml_tensor * input, ggml_tensor * copy) {
    return current && current(owner, backend, input, copy);
}
