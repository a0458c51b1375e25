// Ops for the attention of a tree without flash attention, and for the KV cells of a commit.
//
// Plain decoding puts token after token into cell after cell, and sums over cells are grouped by where they lie. A
// draft in a tree has its ancestors in other cells than that. So that it rounds as in plain decoding, the scores of
// each row, and the values that they weigh, are put where plain decoding would have them: the k-th of a path into the
// cell of its tree's k-th row. That cell is never behind the k-th's own, since a tree is in BFS order. On a CPU
// with flash attention a row's cells are summed one after another, in the same order wherever they lie: there a mask is
// enough. On a card dw_flash_attention does it (ops/layer-parts).
//
// `tree` is that of tree-ops.h; R rows in n_streams streams of R / n_streams. Test: tests/ops/test_tree_attention.py
// (bit-equality with ggml's ops on cells in the order of the path).

#pragma once

#include "ops/door/custom-op.h"

// Of each row the scores of its path to where plain decoding has them. Those behind them are left as they are, the mask
// must cover them. In place; CPU only.
//   scores f32[n_kv, R / n_streams, H, n_streams]; tree
namespace dw::tree_scores {
enum src { scores, tree, n_src };
constexpr const char *     operands[n_src] = { "scores", "tree" };
constexpr op_signature     signature       = { "dw_tree_scores", operands, n_src };
extern const op_descriptor on_cpu;
} // namespace dw::tree_scores

// What ggml_mul_mat(values, weights) gives with row-exact kernels, each row's path moved likewise. CPU only.
//   dst f32[D, R / n_streams, H, n_streams]
//   values [n_kv, D, Hkv, n_streams] F32, F16 or BF16, elements of a row adjacent; weights f32[n_kv, R / n_streams, H,
//   n_streams]; tree
namespace dw::tree_values {
enum src { values, weights, tree, n_src };
constexpr const char *     operands[n_src] = { "values", "weights", "tree" };
constexpr op_signature     signature       = { "dw_tree_values", operands, n_src };
extern const op_descriptor on_cpu;
} // namespace dw::tree_values

// Cells moved one after another, in each of L tensors. In place.
//   cache [n_embd, kv_size, n_streams, L] of any type; moves i32[1 + 2 M]: how many, then (from, to) pairs, cells
//   counted through all streams
namespace dw::tree_commit_rows {
enum src { cache, moves, n_src };
constexpr const char *     operands[n_src] = { "cache", "moves" };
constexpr op_signature     signature       = { "dw_tree_commit_rows", operands, n_src };
extern const op_descriptor on_cpu, on_cuda;
} // namespace dw::tree_commit_rows

// The same where a cache is stored transposed. In place.
//   cache [kv_size, n_embd, n_streams, L], elements as wide as the type's; moves
namespace dw::tree_commit_columns {
enum src { cache, moves, n_src };
constexpr const char *     operands[n_src] = { "cache", "moves" };
constexpr op_signature     signature       = { "dw_tree_commit_columns", operands, n_src };
extern const op_descriptor on_cpu, on_cuda;
} // namespace dw::tree_commit_columns
