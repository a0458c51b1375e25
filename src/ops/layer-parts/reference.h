// What the CPU's versions of the ops in layer-parts.h share. They are references: plain loops, sums in F64.
// Must not know: graphs. Test: tests/ops/test_layer_parts.py.

#pragma once

#include "ggml.h"

#include <cstdint>
#include <vector>

namespace dw::layer_parts {

using values = std::vector<float>;

// row r of a tensor whose first dimension is contiguous
inline const float * row_of(const ggml_tensor * t, int64_t r) {
    return (const float *) ((const char *) t->data + r * t->nb[1]);
}

// x as a product with weights of this type sees it: in blocks of 32 values of 8 bits if they are quantised
values seen_by(ggml_type weights, const float * x, int64_t n);

// rms_norm(x) * weights
values normalised(const float * x, const float * weights, int64_t n, float epsilon);

// weights [K, rows, experts] of one expert times x, as seen_by gives it, for rows [first, first + n)
values product(const ggml_tensor * weights, const values & x, int64_t first, int64_t n, int64_t expert = 0);

// all rows of weights [K, rows] times x, which is not yet seen
values product(const ggml_tensor * weights, const values & x);

float sigmoid(float x);
float silu(float x);
float softplus(float x);

} // namespace dw::layer_parts
