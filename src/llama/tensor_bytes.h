// Where the bytes of a tensor lie, and copies of a part of them. A view lies where its source lies.
// Must not know: contexts, graphs. Test: tests/model/engine/test_short_head.py, tests/gpu/test_same_text.py.

#pragma once

#include "ggml-backend.h"

#include <cstddef>
#include <vector>

namespace draftwood {

// Of a tensor that has its memory.
ggml_backend_buffer_t      buffer_of(const ggml_tensor * tensor) noexcept;
ggml_backend_buffer_type_t buffer_type_of(const ggml_tensor * tensor) noexcept;
bool                       is_on_host(const ggml_tensor * tensor) noexcept; // the CPU reads it in place

// Host memory that the device of `backend` reads and writes by itself. llama.cpp's allocation of such memory may fall
// back on other memory. nullptr is not.
bool is_pinned_for(ggml_backend_t backend, ggml_backend_buffer_t buffer) noexcept;

// All are in memory of one device, or the host's. A device may have several kinds, as for experts in a pool. nullptr is
// in none.
bool are_together(const std::vector<const ggml_tensor *> & tensors) noexcept;

// Copies n bytes `from` offset `offset` on `to` offset `at`, in the stream of `backend`, which must reach both.
void copy_bytes(ggml_backend_t backend, const ggml_tensor * to, size_t at, const ggml_tensor * from, size_t offset,
                size_t n) noexcept;

} // namespace draftwood
