// CPU ops for the attention of a tree without flash attention, and for the KV cells of a commit.
//
// Plain decoding puts token after token into cell after cell, and sums over cells are grouped by where they lie. A
// draft in a tree has its ancestors in other cells than that. So that it rounds as in plain decoding, the scores of
// each row, and the values that they weigh, are put where plain decoding would have them: the k-th of a path into the
// cell of its tree's k-th row. That cell is never behind the k-th's own, since a tree is in BFS order. With flash
// attention a row's cells are summed one after another, in the same order wherever they lie: there a mask is enough.
//
// `tree` is that of tree-ops.h; R rows in n_streams streams of R / n_streams. Test: tests/ops/test_tree_attention.py
// (bit-equality with ggml's ops on cells in the order of the path).

#pragma once

#include "ops/tree-delta-net/tree-ops.h"

#ifdef __cplusplus
extern "C" {
#endif

// "dw_tree_scores", in place: of each row the scores of its path to where plain decoding has them. Those behind them
// are left as they are, the mask must cover them.
//   dst [n_kv, R / n_streams, H, n_streams] f32; src: tree
void dw_tree_scores(struct ggml_tensor * dst, int ith, int nth, void * userdata);

// "dw_tree_values": what ggml_mul_mat(values, weights) gives with row-exact kernels, each row's path moved likewise.
//   dst [D, R / n_streams, H, n_streams]; src: values [n_kv, D, Hkv, n_streams] F32, F16 or BF16, elements of a row
//   adjacent, weights f32 [n_kv, R / n_streams, H, n_streams], tree
void dw_tree_values(struct ggml_tensor * dst, int ith, int nth, void * userdata);

// "dw_tree_commit_rows", in place: cells moved one after another. moves i32[1 + 2 M]: how many, then (from, to) pairs,
// cells counted through all streams.
//   dst [n_embd, kv_size, n_streams] of any type; src: moves
void dw_tree_commit_rows(struct ggml_tensor * dst, int ith, int nth, void * userdata);

// "dw_tree_commit_columns", in place: the same where a cache is stored transposed.
//   dst [kv_size, n_embd, n_streams], elements as wide as the type's; src: moves
void dw_tree_commit_columns(struct ggml_tensor * dst, int ith, int nth, void * userdata);

#ifdef __cplusplus
}
#endif
