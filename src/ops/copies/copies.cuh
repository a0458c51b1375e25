// See copies.h. Test: tests/ops/test_cuda_copies.py.

#pragma once

#include "ops/copies/copies.h"

#include <cuda_runtime.h>

namespace dw {

void copy_pieces(const piece * pieces, int n, cudaStream_t stream);

} // namespace dw
