// The state of a gated-delta-net layer that an op writes: a cell of all states.

#pragma once

#include "ops/door/launch.h"

namespace dw::layer_parts {

// target: f32, as many values as a row of `states`
inline bool is_cell(const ggml_tensor * target, const ggml_tensor * states) {
    return dw::is_f32(target) && dw::is_f32(states) && ggml_nelements(target) == states->ne[0] &&
           ggml_is_contiguous(target);
}

} // namespace dw::layer_parts
