// MUL_MAT and MUL_MAT_ID on CPU, for any number of rows, none of which depends on how many there are.
// Compiled inside the ggml-cpu target with its flags; called from ggml_compute_forward_mul_mat(_id).

#pragma once

#include "ggml.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;

// Both take weights src0 and f32 activations src1, and write f32 dst; sizes in ggml's order, elements of a row
// adjacent. Weights in F16 or BF16: rows are converted to f32 once, a tile of them at a time, and meet every row of
// src1 in one dot product of fixed order. ggml's own F16 path rounds src1 to F16 and converts the weight row once per
// row of src1; this is closer to exact, and cheaper from two rows on. No thread waits for another. Quantised weights:
// the types of quant-rows.h. Activations are quantised first, as ggml does, by all threads together, which then wait
// for each other; few activations by each thread for itself. A result depends on its own two rows alone. Every thread
// of the op calls; threads share out the weight rows.
//
// Each returns false, having written nothing, unless params->use_ref is set and types and layout are as above.
// Tests: tests/ops/test_mul_mat_rows.py, test_quant_rows.py (float64 oracle, bit-equality over batch sizes).

// dst [ne01, ne11, ne12, ne13] = src0 [ne00, ne01, ne02, ne03] x src1 [ne00, ne11, ne12, ne13], with ggml's
// broadcast of src0 over dimensions 2 and 3
bool dw_op_mul_mat_rows(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// dst [ne01, n_used, n_tokens]: row (s, t) = src0[:, :, ids[s, t]] x src1[:, s % ne11, t]
//   src0 [ne00, ne01, n_expert], src1 [ne00, ne11, n_tokens], ids (src[2]) i32 [n_used, n_tokens]
bool dw_op_mul_mat_id_rows(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// out f32[1] = row . x in the order of the two above; row F16 or BF16 [n], x f32[n]
void dw_dot_row(enum ggml_type type, int64_t n, const void * row, const float * x, float * out);

#ifdef __cplusplus
}
#endif
