// Copies of a few pieces of memory in one launch. A graph has some ten inputs, most of a few bytes, and a copy of each
// by itself takes the stream 3 us. Found by name in the registry of ggml-cuda (door/registry.h).
// Test: tests/ops/test_cuda_copies.py, tests/gpu/test_same_text.py.

#pragma once

#include "ggml-backend.h"

#include <cstddef>

namespace dw {

constexpr const char * copies_name = "dw_copies";

// to, from: in the device's memory, or in pinned memory of the host. No piece overlaps another.
struct piece {
    void *       to;
    const void * from;
    size_t       n_bytes;
};

// Copies n pieces in the stream of a CUDA backend, without waiting and in no order.
using copies = void (*)(ggml_backend_t backend, const piece * pieces, int n);

} // namespace dw
