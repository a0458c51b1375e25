// MUL by one value a row, on CPU. Compiled inside the ggml-cpu target; called where ggml computes GGML_OP_MUL.

#pragma once

#include "ggml.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;

// dst f32 [ne0, ne1, ne2, ne3] = src0 (same shape) times src1 f32 [1, ne11, ne12, ne13], repeated as ggml does:
// expert weights and gates. ggml works such rows through its loop for general shapes, one call an element;
// here a row is one vectorised loop. Same products, so bit-equal to ggml's. Threads share out the rows.
//
// Returns false, having written nothing, unless params->use_ref is set and types and layout are as above.
// Test: tests/ops/test_mul_scalar.py (bit-equality with ggml's own).
bool dw_op_mul_scalar(const struct ggml_compute_params * params, struct ggml_tensor * dst);

#ifdef __cplusplus
}
#endif
