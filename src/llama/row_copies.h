// Copies that are made in one launch on a GPU (ops/copies/copies.h), for rooms that do not know ops.
// Test: tests/ops/test_cuda_copies.py.

#pragma once

#include "ops/copies/copies.h"

namespace draftwood {

using row_piece  = dw::piece;
using row_copies = dw::copies;

} // namespace draftwood
