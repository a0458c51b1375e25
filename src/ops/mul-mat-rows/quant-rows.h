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

struct quant_product {
    int64_t              n; // values of a row
    const char *         weights;
    size_t               stride; // bytes from one weight row to the next
    int64_t              n_rows; // of weights
    const char * const * x;      // quantised rows of activations
    float * const *      out;
    int64_t              n_cols; // of x and out
};

// out[c][r] = weight row r . x[c] for this thread's share of the weight rows: threads are 0 to nth - 1.
void quant_rows(ggml_type type, const quant_product & m, int ith, int nth);

// The same with vectors of one width: quant-products-wide.cpp, quant-products-narrow.cpp.
void quant_products_wide(ggml_type type, const quant_product & m, int ith, int nth);
void quant_products_narrow(ggml_type type, const quant_product & m, int ith, int nth);

} // namespace dw
