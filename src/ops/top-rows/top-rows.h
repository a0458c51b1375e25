// The best tokens of each row of logits, with what a softmax over the row needs: so that nobody copies raw logits to
// the host to choose or rank a few tokens.
// Test: tests/ops/test_top_rows.py (float64), tests/gpu/test_tree_ops_cuda.py (equal to this one).

#pragma once

#include "ops/door/custom-op.h"
#include "ops/door/node.h"
#include "ops/top-rows/row.h"

// K, from dst's shape, is 1 to max_k and at most n_vocab.
//   dst f32[2 K + 2, R], rows as row.h packs them. Of equal logits the earlier comes first. A NaN comes after all
//   numbers, -inf included, and neither sum counts it.
//
//   logits f32[n_vocab, R]
//
//   tokens i32[n_vocab], optional: the token of each logit; dst then has these as ids
namespace dw::top_rows {
enum src { logits, tokens, n_src };
constexpr const char *     operands[n_src] = { "logits", "tokens" };
constexpr op_signature     signature       = { "dw_top_rows", operands, n_src, /*n_optional*/ 1 };
extern const op_descriptor on_cpu, on_cuda;

constexpr int64_t max_k     = 64;      // most tokens of a row
constexpr int64_t max_vocab = 1 << 20; // most logits of a row on CUDA

// a node for these logits [n_vocab, R]; named: nullptr or their tokens
inline ggml_tensor * build(ggml_context * ctx, ggml_tensor * of, ggml_tensor * named, int64_t k,
                           const dw_custom_op & op) {
    return new_node(ctx, op, { layout_for(k).n_values, of->ne[1], 1, 1 }, { { logits, of }, { tokens, named } });
}
} // namespace dw::top_rows
