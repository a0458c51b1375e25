// See fetched.h.

#include "llama/fetched.h"

#include "llama/status.h"
#include "llama/tensor_bytes.h"

namespace draftwood {

namespace {

// pinned for the device of `backend`, if it has such
ggml_backend_buffer_type_t host_memory_for(ggml_backend_t backend) {
    ggml_backend_buffer_type_t pinned = ggml_backend_dev_host_buffer_type(ggml_backend_get_device(backend));
    return pinned ? pinned : ggml_backend_cpu_buffer_type();
}

} // namespace

void fetched_values::ask(ggml_backend_t backend, row_copies copies, const ggml_tensor * from, size_t n_bytes) {
    is_asked_ = false;
    if (!buffer_ || ggml_backend_buffer_get_size(buffer_.get()) < n_bytes) {
        wait();
        buffer_.reset(ggml_backend_buft_alloc_buffer(host_memory_for(backend), n_bytes));
    }
    if (!buffer_) {
        fail(DW_ERR_MEMORY, "no memory on the host for %zu bytes of results", n_bytes);
    }
    void * const to = ggml_backend_buffer_get_base(buffer_.get());
    if (copies && is_pinned_for(backend, buffer_.get()) && !is_on_host(from)) {
        const row_piece piece{ to, from->data, n_bytes };
        copies(backend, &piece, 1);
    } else {
        ggml_backend_tensor_get_async(backend, from, to, 0, n_bytes);
    }
    there_.record(backend);
    writer_   = backend;
    is_asked_ = true;
}

const void * fetched_values::get() {
    wait();
    return ggml_backend_buffer_get_base(buffer_.get());
}

void fetched_values::wait() {
    if (writer_ && !there_.wait_on_host()) {
        ggml_backend_synchronize(writer_);
    }
    writer_ = nullptr;
}

} // namespace draftwood
