// Copies that are made in one launch on a GPU (ops/copies/copies.h), for rooms that do not know ops.
// Test: tests/ops/test_cuda_copies.py.

#pragma once

#include "ops/copies/copies.h"

#include <cstring>

namespace draftwood {

using row_piece  = dw::piece;
using row_copies = dw::copies;

// the same at once, of pieces in host memory
inline void copy_on_host(ggml_backend_t, const row_piece * pieces, int n) {
    for (int i = 0; i < n; ++i) {
        std::memcpy(pieces[i].to, pieces[i].from, pieces[i].n_bytes);
    }
}

} // namespace draftwood
