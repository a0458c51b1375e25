// Rows of activations, quantised, times quantised weights: what mul-mat-rows.cpp calls for these types.
// Types: Q4_K, Q5_K, Q6_K, IQ4_XS with activations in Q8_K; Q4_0, Q5_0, Q8_0, IQ4_NL with activations in Q8_0.
// A block of weights is unpacked once for up to 256 rows of activations. A result depends on its own two rows alone.
// On a CPU without AVX2 or NEON's dotprod no type is supported, and ggml multiplies row by row.
// Test: tests/ops/test_quant_rows.py.

#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>

namespace dw {

// Whether weights of this type are multiplied here.
bool quant_rows_support(ggml_type type);

// Bytes of n activations as quantised for these weights: those of ggml_row_size of ggml's own vec_dot_type.
size_t quant_row_size(ggml_type weights, int64_t n);

// Quantise blocks [first, last) of a row of f32 activations x; out is the quantised row's begin. A block has
// quant_block_size(weights) values.
int64_t quant_block_size(ggml_type weights);
void    quantise_row(ggml_type weights, const float * x, char * out, int64_t first, int64_t last);

// out[c][r] = weight row r . x[c] for this thread's share of a matrix of n_rows rows: threads are 0 to nth - 1.
// x: n_cols quantised rows of n values. stride: bytes from one weight row to the next.
void quant_rows(ggml_type type, int64_t n, const char * weights, size_t stride, const char * const * x,
                float * const * out, int64_t n_cols, int64_t n_rows, int ith, int nth);

} // namespace dw
