// Ops for a verify that leaves the recurrent state alone: a gated-delta-net layer over a tree of draft tokens, and the
// commit of one path of it afterwards. They enter a graph as GGML_OP_CUSTOM. Their descriptors are found by name in the
// registries of ggml-cpu and ggml-cuda (door/registry.h).
//
// A batch has R rows: n_seqs trees of N nodes each, one after another, every tree in BFS order and its root following
// the state that its sequence's cell holds. A chain is a tree. A tree may be padded with copies of its last node, which
// are roots if that is the root. What the ops know of it is `tree` i32[M, 4]:
//
//     parents    by row, a row of the batch or -1 at a root
//     depths     by row, 0 at a root
//     preorder   the rows, parents first and each followed by its descendants
//     cells      by row, where its keys and values lie in the KV cache of its stream (tree-attention.h)
//
// Sizes: S = head size, H = value heads, Hk = key heads, C = conv channels, W = conv kernel, M = most rows a scratch
// has room for. All f32 unless said otherwise.
//
// Each op is a namespace: the enum `src` has the index of each operand, `signature` its name and its operands' names.
// Ops in place write to their first operand.
//
// What a node leaves behind ("factors") is what a commit needs and no more: k [Hk][S], u = beta (v - e^g S^T k) [H][S],
// g [H], and its conv input [C]: 1.7 MB a node at 35B-A3B shapes, where a copy of the state is 66 MB. Their layout:
// tree-factors.h. Test: tests/ops/test_tree_ops.py (float64 oracle on each root-to-leaf path, bit-equality with the
// stock ops).

#pragma once

#include "ops/door/custom-op.h"

// For each node the W inputs that its convolution sees: itself and W - 1 ancestors, those beyond the root from its
// sequence's conv state. Input of ggml_ssm_conv as R sequences of one token.
//   dst f32[W, C, R]
//   x [C, R]; states [(W-1) * C, n_cells], conv states; cells i32[n_seqs], of the states; tree
namespace dw::tree_conv_windows {
enum src { x, states, cells, tree, n_src };
constexpr const char *     operands[n_src] = { "x", "states", "cells", "tree" };
constexpr op_signature     signature       = { "dw_tree_conv_windows", operands, n_src };
extern const op_descriptor on_cpu, on_cuda;
} // namespace dw::tree_conv_windows

// The delta rule of delta-net.h along each path, the state read once and not written. In place.
//   scratch [factors | out]: those of tree-factors.h, then out [R][H][S]
//   q, k [S, Hk, N, n_seqs]; v [S, H, N, n_seqs]; g, beta [1, H, N, n_seqs]; states [S*S*H, n_cells];
//   cells i32[n_seqs], of the states; tree
namespace dw::tree_delta_net {
enum src { scratch, q, k, v, g, beta, states, cells, tree, n_src };
constexpr const char *     operands[n_src] = { "scratch", "q", "k", "v", "g", "beta", "states", "cells", "tree" };
constexpr op_signature     signature       = { "dw_tree_delta_net", operands, n_src };
extern const op_descriptor on_cpu, on_cuda;
} // namespace dw::tree_delta_net

// A commit works on L layers at once. On a GPU one layer is too little work for a launch.

// S <- e^g S + k u^T for each node of the path. In place.
//   state [S, S, H, L], of a cell; factors [n, L] as above; path i32[1 + M]: its length, then its rows from the root on
namespace dw::tree_commit_state {
enum src { state, factors, path, n_src };
constexpr const char *     operands[n_src] = { "state", "factors", "path" };
constexpr op_signature     signature       = { "dw_tree_commit_state", operands, n_src };
extern const op_descriptor on_cpu, on_cuda;
} // namespace dw::tree_commit_state

// The last W - 1 conv inputs, old ones first. In place.
//   state [W - 1, C, L], the conv state of a cell; x [C, M, L]; path
namespace dw::tree_commit_conv {
enum src { state, x, path, n_src };
constexpr const char *     operands[n_src] = { "state", "x", "path" };
constexpr op_signature     signature       = { "dw_tree_commit_conv", operands, n_src };
extern const op_descriptor on_cpu, on_cuda;
} // namespace dw::tree_commit_conv
