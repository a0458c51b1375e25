// See tensor_bytes.h.

#include "llama/tensor_bytes.h"

#include <algorithm>

namespace draftwood {

namespace {

// n bytes from `offset` on, as a tensor of its own
ggml_tensor part_of(const ggml_tensor * tensor, size_t offset, size_t n) noexcept {
    ggml_tensor part{};
    part.type   = GGML_TYPE_I8;
    part.buffer = buffer_of(tensor);
    part.data   = (char *) tensor->data + offset;
    part.ne[0]  = (int64_t) n;
    part.nb[0]  = 1;
    for (int i = 1; i < GGML_MAX_DIMS; ++i) {
        part.ne[i] = 1;
        part.nb[i] = n;
    }
    return part;
}

} // namespace

ggml_backend_buffer_t buffer_of(const ggml_tensor * tensor) noexcept {
    return tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
}

ggml_backend_buffer_type_t buffer_type_of(const ggml_tensor * tensor) noexcept {
    return ggml_backend_buffer_get_type(buffer_of(tensor));
}

bool is_on_host(const ggml_tensor * tensor) noexcept {
    return ggml_backend_buffer_is_host(buffer_of(tensor));
}

bool is_pinned_for(ggml_backend_t backend, ggml_backend_buffer_t buffer) noexcept {
    return buffer &&
           ggml_backend_buffer_get_type(buffer) == ggml_backend_dev_host_buffer_type(ggml_backend_get_device(backend));
}

bool are_together(const std::vector<const ggml_tensor *> & tensors) noexcept {
    const auto place = [](const ggml_tensor * t) {
        return is_on_host(t) ? nullptr : ggml_backend_buft_get_device(buffer_type_of(t));
    };
    return std::all_of(tensors.begin(), tensors.end(),
                       [&](const ggml_tensor * each) { return each && place(each) == place(tensors[0]); });
}

void copy_bytes(ggml_backend_t backend, const ggml_tensor * to, size_t at, const ggml_tensor * from, size_t offset,
                size_t n) noexcept {
    const ggml_tensor source = part_of(from, offset, n);
    ggml_tensor       target = part_of(to, at, n);
    ggml_backend_tensor_copy_async(backend, backend, &source, &target);
}

} // namespace draftwood
