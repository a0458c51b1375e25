// CPU ops for a verify that leaves the recurrent state alone: a gated-delta-net layer over a tree of draft tokens,
// and the commit of one path of it afterwards. Compiled inside the ggml-cpu target; they enter a graph as
// GGML_OP_CUSTOM and are looked up through the backend registry (dw_tree_op_find), since that target may be a module.
//
// A batch has R rows: n_seqs trees of N nodes each, one after another, every tree in BFS order and its root following
// the state that its sequence's cell holds. A chain is a tree; where a tree is padded with copies of its root, these
// are roots, too. What the ops know of it is `tree` i32[M, 4]:
//
//     parents    by row, a row of the batch or -1 at a root
//     depths     by row, 0 at a root
//     preorder   the rows, parents first and each followed by its descendants
//     cells      by row, where its keys and values lie in the KV cache of its stream (tree-attention.h)
//
// Sizes: S = head size, H = value heads, Hk = key heads, C = conv channels, W = conv kernel, M = most rows a scratch
// has room for. All f32 unless said otherwise.
//
// The first is a node of its own (ggml_custom_4d); the others write to dst in place (ggml_custom_inplace: src[0] is
// dst itself, those named below follow).
//
// What a node leaves behind ("factors") is what a commit needs and no more: k [Hk][S], u = beta (v - e^g S^T k) [H][S],
// g [H], and its conv input [C]: 1.7 MB a node at 35B-A3B shapes, where a copy of the state is 63 MB.
// Test: tests/ops/test_tree_ops.py (float64 oracle on each root-to-leaf path, bit-equality with the stock ops).

#pragma once

#include "ggml-backend.h"

#ifdef __cplusplus
extern "C" {
#endif

// ggml_custom_op_t by name: one of those below or in tree-attention.h; NULL for any other name
GGML_BACKEND_API void * dw_tree_op_find(const char * name);

// "dw_tree_conv_windows": for each node the W inputs that its convolution sees: itself and W - 1 ancestors, those
// beyond the root from its sequence's conv state. Input of ggml_ssm_conv as R sequences of one token.
//   dst [W, C, R]; src: x [C, R], conv states [(W-1) * C, n_cells], state cells i32[n_seqs], tree
void dw_tree_conv_windows(struct ggml_tensor * dst, int ith, int nth, void * userdata);

// "dw_tree_delta_net": the delta rule of delta-net.h along each path, the state read once and not written.
//   dst [factors | out]: k [M][Hk][S], u [M][H][S], g [M][H], then out [R][H][S]
//   src: q, k [S, Hk, N, n_seqs], v [S, H, N, n_seqs], g, beta [1, H, N, n_seqs], states [S*S*H, n_cells],
//        state cells i32[n_seqs], tree
void dw_tree_delta_net(struct ggml_tensor * dst, int ith, int nth, void * userdata);

// "dw_tree_commit_state": S <- e^g S + k u^T for each node of the path.
//   dst [S, S, H], a cell's state; src: factors as above, path i32[1 + M]: its length, then its rows from the root on
void dw_tree_commit_state(struct ggml_tensor * dst, int ith, int nth, void * userdata);

// "dw_tree_commit_conv": the last W - 1 conv inputs, old ones first.
//   dst [W - 1, C], a cell's conv state; src: x [C, M], path
void dw_tree_commit_conv(struct ggml_tensor * dst, int ith, int nth, void * userdata);

#ifdef __cplusplus
}
#endif
