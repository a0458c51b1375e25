// The best tokens of each row of logits, with what a softmax over the row needs: so that nobody copies raw logits to
// the host to choose or rank a few tokens.
// Test: tests/ops/test_top_rows.py (float64), tests/gpu/test_tree_ops_cuda.py (equal to this one).

#pragma once

#include "ggml-backend.h"
#include "ops/door/custom-op.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    DW_TOP_ROWS_MAX   = 64,   // most tokens of a row
    DW_TOP_ROWS_PART  = 8192, // logits that a block of a GPU looks at
    DW_TOP_ROWS_PARTS = 128,  // most of them in a row
};

// "dw_top_rows". K, from dst's shape, is 1 to DW_TOP_ROWS_MAX and at most n_vocab.
//   dst f32[2 K + 2, R], a row: ids of the K best tokens, best first (the bits of int32), their logits, the greatest
//   logit, the logarithm of the sum of all exponentials. Of equals the smaller id comes first; a NaN comes after all
//   numbers, -inf included, and is left out of both sums.
//   src: logits f32[n_vocab, R]; scratch f32[dw_top_rows_scratch(n_vocab, R, K)], which only a GPU needs
GGML_BACKEND_API void dw_top_rows(struct ggml_tensor * dst, int ith, int nth, void * userdata);

static inline int64_t dw_top_rows_parts(int64_t n_vocab) {
    return (n_vocab + DW_TOP_ROWS_PART - 1) / DW_TOP_ROWS_PART;
}

// f32 values: of each part of a row K tokens of two values, its greatest logit and its sum
static inline int64_t dw_top_rows_scratch(int64_t n_vocab, int64_t n_rows, int64_t k) {
    return n_rows * dw_top_rows_parts(n_vocab) * (2 * k + 2);
}

// a node for these logits [n_vocab, R]
static inline struct ggml_tensor * dw_build_top_rows(struct ggml_context * ctx, struct ggml_tensor * logits, int64_t k,
                                                     const struct dw_custom_op * op) {
    const int64_t        n_scratch = dw_top_rows_scratch(logits->ne[0], logits->ne[1], k);
    struct ggml_tensor * sources[] = { logits, ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n_scratch) };
    return ggml_custom_4d(ctx, GGML_TYPE_F32, 2 * k + 2, logits->ne[1], 1, 1, sources, 2, op->cpu, GGML_N_TASKS_MAX,
                          (void *) op);
}

#ifdef __cplusplus
}
#endif
