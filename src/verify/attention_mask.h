// Writes into the mask of a decode's attention (placed_rows in llama/decode_request.h).
// Test: tests/model/engine/test_trees.py.

#pragma once

#include "ggml.h"

#include <cmath>
#include <cstdint>

namespace draftwood {

// whether a row sees a cell; mask f32 or f16 [n_kv, rows / n_streams, 1, n_streams], the cell counted in its stream
inline void set_visible(const ggml_tensor * mask, int64_t row, int64_t cell, bool visible) {
    char * at =
        (char *) mask->data + cell * mask->nb[0] + row % mask->ne[1] * mask->nb[1] + row / mask->ne[1] * mask->nb[3];
    const float value = visible ? 0.0f : -INFINITY;
    if (mask->type == GGML_TYPE_F16) {
        *(ggml_fp16_t *) at = ggml_fp32_to_fp16(value);
    } else {
        *(float *) at = value;
    }
}

} // namespace draftwood
