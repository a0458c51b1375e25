// Parts of a layer as one op each: what llama.cpp builds from 5 to 30 nodes, and a GPU launches as so many kernels. A
// decode of few rows is bound by launches, not by bytes: 35B-A3B takes 1,580 kernels and 4.1 ms a token on an H200, and
// its bytes 0.45 ms.
//
// Each row's result has the same bits whatever the number of rows beside it, 1 to max_rows: sums run in an order that
// depends on the sizes of weights and heads, and in attention on places in the cache. So a verify of so many rows
// computes what plain decoding computes.
//
// Weights are read as ggml stores them. A product of quantised weights takes its input in blocks of 32 values of 8 bits
// with an F16 scale (ggml's q8_1), as ggml-cuda's own does, and with an F32 scale where a block normalises or gates its
// input itself (late-inputs.cuh); other weights take F32. The reference has F16 scales. On CUDA
// quantised weights and attention need compute capability 8.0 of all devices: takes() declines them elsewhere.
//
// Words: a pair is a row and one of its heads in attention, a row and one of its experts in a network, and two values
// of a head that turn together in rotation.h. A place is a position in a chunk of cells, or where an expert lies.
//
// Sizes: D = width of the model, n = rows, E = experts, k = experts of a row, F = width of an expert, G = width of the
// shared expert. All f32 unless said otherwise; "weights" are of is_product_type(). dst is contiguous.
// Test: tests/ops/test_layer_parts.py (float64), tests/gpu/test_layer_parts_cuda.py (against the CPU, rows bit for
// bit).

#pragma once

#include "ops/layer-parts/layer-settings.h"

namespace dw::layer_parts {

// The feed-forward half of a layer, its residual included:
//   h = rms_norm(x) * norm;  p = softmax(router h), the k largest divided by their sum
//   dst[D, n] = x + sum of p_e down_e(silu(gate_e h) * up_e h) over these, in the order of rank,
//             + sigmoid(shared_router h) shared_down(silu(shared_gate h) * shared_up h)
//   Of equal probabilities the lower expert comes first.
//   x [D, n]; norm [D]; router weights [D, E], float; gate, up weights [D, F, E]; down weights [F, D, E];
//   shared_router weights [D, 1], float; shared_gate, shared_up weights [D, G]; shared_down weights [G, D]
//   settings: epsilon, n_used, is_joint
// F and G are multiples of 32. gate and up are of one type, so are shared_gate and shared_up, and both routers.
namespace experts {
enum src { x, norm, router, gate, up, down, shared_router, shared_gate, shared_up, shared_down, n_src };
constexpr const char *     operands[n_src] = { "x",    "norm",          "router",      "gate",      "up",
                                               "down", "shared_router", "shared_gate", "shared_up", "shared_down" };
constexpr op_signature     signature       = { "dw_experts", operands, n_src };
extern const op_descriptor on_cpu, on_cuda;
} // namespace experts

// The same in two ops, for experts that lie in a pool (ops/expert-slots/expert-slots.h): between the two a third one
// makes room for the chosen ones and says where they are. Bits are those of dw_experts.
//
//   dst i32[size(E, n, D)]: of each row E values, the k experts, best first; then k + 1 weights, as the bits of f32:
//   theirs, and that of the shared expert; with a next router then the k experts that it makes of the same x, best
//   first; the others are undefined. E >= 2 k + 1, with a next router 3 k + 1. Behind all rows, undefined on a CPU:
//   from logits_at on those of both routers, f32[2, n, E + 1], the shared expert's last; from h_at on h as
//   dw_chosen_experts of the same device takes it
//
//   x [D, n]; norm [D]; router weights [D, E], float; shared_router weights [D, 1], float; next_norm [D] and
//   next_router weights [D, E], of the layer that follows: both or none
//
//   settings: epsilon, n_used, is_open. An open choice has logits and h alone, on CUDA: the dw_expert_slots that reads
//   it makes it whole before it looks for slots, in one kernel where two would follow each other. On a CPU it is whole
namespace choice {
enum src { x, norm, router, shared_router, next_norm, next_router, n_src };
constexpr const char *     operands[n_src] = { "x", "norm", "router", "shared_router", "next_norm", "next_router" };
constexpr op_signature     signature       = { "dw_choice", operands, n_src, /*n_optional*/ 2 };
extern const op_descriptor on_cpu, on_cuda;

// where a row of dst has the next router's experts
constexpr int32_t next_at(int32_t n_used) {
    return 2 * n_used + 1;
}
// multiples of 128 bytes
constexpr int64_t logits_at(int64_t n_experts, int64_t n) {
    return (n_experts * n + 31) / 32 * 32;
}
constexpr int64_t h_at(int64_t n_experts, int64_t n) {
    return logits_at(n_experts, n) + (2 * n * (n_experts + 1) + 31) / 32 * 32;
}
// h takes 4 bytes a value as F32, and behind that 1 and 8 a block of 32 as 8 bits, and up to 56 a row: there is room
// for 8 a value, of which rows have 32 or more
constexpr int64_t size(int64_t n_experts, int64_t n, int64_t width) {
    return h_at(n_experts, n) + 2 * n * width;
}
} // namespace choice

//   dst[D, n] = x + the weighted sum, as above
//   choice: dw_choice's dst; indices i32[k, n, planes], contiguous: where the chosen experts lie, for each rank and
//   row; the others as above, but that gate, up and down have so many experts as there are indices. On CUDA an index
//   may be complemented, where dw_expert_ready stands in front: this op waits for that expert
//
//   settings: epsilon, n_used, is_joint, planes, n_experts
namespace chosen_experts {
enum src { x, norm, choice, indices, gate, up, down, shared_gate, shared_up, shared_down, n_src };
constexpr const char *     operands[n_src] = { "x",  "norm", "choice",      "indices",   "gate",
                                               "up", "down", "shared_gate", "shared_up", "shared_down" };
constexpr op_signature     signature       = { "dw_chosen_experts", operands, n_src };
extern const op_descriptor on_cpu, on_cuda;
} // namespace chosen_experts

// The feed-forward half of a dense layer, its residual included:
//   h = rms_norm(x) * norm;  dst[D, n] = x + down(silu(gate h) * up h)
//   x [D, n]; norm [D]; gate, up weights [D, F]; down weights [F, D]
//   settings: epsilon
// F is a multiple of 32. gate and up are of one type.
namespace feed_forward {
enum src { x, norm, gate, up, down, n_src };
constexpr const char *     operands[n_src] = { "x", "norm", "gate", "up", "down" };
constexpr op_signature     signature       = { "dw_feed_forward", operands, n_src };
extern const op_descriptor on_cpu, on_cuda;
} // namespace feed_forward

// What a gated-delta-net layer computes from its input, h = rms_norm(x) * norm:
//   dst[(rows of qkv + rows of z + 2 H) * n]: qkv h, z h, sigmoid(beta h), softplus(alpha h + dt) * a, one after
//   another, each [rows, n]
//   x [D, n]; norm [D]; qkv, z, beta, alpha weights [D, rows]; dt, a [H], H the rows of alpha and of beta
//   settings: epsilon
namespace delta_inputs {
enum src { x, norm, qkv, z, beta, alpha, dt, a, n_src };
constexpr const char *     operands[n_src] = { "x", "norm", "qkv", "z", "beta", "alpha", "dt", "a" };
constexpr op_signature     signature       = { "dw_delta_inputs", operands, n_src };
extern const op_descriptor on_cpu, on_cuda;
} // namespace delta_inputs

// What an attention layer, or several, compute from one input, h = rms_norm(x) * norm:
//   dst[rows of all weights * n]: w h of each of these, queries, keys and values, one after another, each [rows, n]
//   x [D, n]; norm [D]; w0 to w7 weights [D, rows]: w0 is required, and behind the last one all are nullptr
//   settings: epsilon
namespace attention_inputs {
constexpr int most_weights = 8;
enum src { x, norm, weights, n_src = weights + most_weights };
constexpr const char *     operands[n_src] = { "x", "norm", "w0", "w1", "w2", "w3", "w4", "w5", "w6", "w7" };
constexpr op_signature     signature       = { "dw_attention_inputs", operands, n_src, most_weights - 1 };
extern const op_descriptor on_cpu, on_cuda;

// how many weights a node has
inline int n_weights(const ggml_tensor * dst) {
    int n = 1;
    while (n < most_weights && dst->src[weights + n]) {
        ++n;
    }
    return n;
}
} // namespace attention_inputs

// The input of an MTP block, of a token's embedding and the hidden state before it:
//   dst[D, n] = weights [rms_norm(e) * e_norm, rms_norm(h) * h_norm], one behind the other
//   e, h [D, n]; e_norm, h_norm [D]; weights [2 D, D]; D at most max_width / 2
//   settings: epsilon
namespace draft_input {
enum src { e, e_norm, h, h_norm, weights, n_src };
constexpr const char *     operands[n_src] = { "e", "e_norm", "h", "h_norm", "weights" };
constexpr op_signature     signature       = { "dw_draft_input", operands, n_src };
extern const op_descriptor on_cpu, on_cuda;
} // namespace draft_input

// Keys, queries and values of a gated-delta-net layer:
//   y = silu(convolution of the windows);  dst[C * n]: q, k [S, Hk, n] and v [S, H, n], one after another; those of q
//   and k are rms_norm(y) / sqrt(S), by head
//   windows [T + W - 1, C, n / T], of n / T sequences of T rows; kernel [W, C]; C = (2 Hk + H) S
//   settings: epsilon, size, n_keys
namespace delta_heads {
enum src { windows, kernel, n_src };
constexpr const char *     operands[n_src] = { "windows", "kernel" };
constexpr op_signature     signature       = { "dw_delta_heads", operands, n_src };
extern const op_descriptor on_cpu, on_cuda;
} // namespace delta_heads

// Keys, queries and values along a chain of one sequence, from the convolution state of a cell; `target` becomes the
// state behind it.
//   dst as of delta_heads
//   x [C, n] contiguous; states [(W - 1) * C, n_cells]; cells i32, the first counts; target [(W - 1) * C], of the
//   states; kernel [W, C], W = 4
//   settings: epsilon, size, n_keys
namespace delta_front {
enum src { x, states, cells, target, kernel, n_src };
constexpr const char *     operands[n_src] = { "x", "states", "cells", "target", "kernel" };
constexpr op_signature     signature       = { "dw_delta_front", operands, n_src };
extern const op_descriptor on_cpu, on_cuda;
} // namespace delta_front

// Keys, queries and values of the nodes of trees, each from its own input and its ancestors', those beyond the root
// from its sequence's convolution state; `kept` becomes x, for the commit. What dw_tree_conv_windows (tree-ops.h) and
// dw_delta_heads compute.
//   dst as of delta_heads
//   x [C, n] contiguous; states [(W - 1) * C, n_cells]; cells i32[n_seqs], of the states; tree as in tree-ops.h;
//   kept [C, n] contiguous; kernel [W, C], W = 4
//   settings: epsilon, size, n_keys
namespace delta_tree {
enum src { x, states, cells, tree, kept, kernel, n_src };
constexpr const char *     operands[n_src] = { "x", "states", "cells", "tree", "kept", "kernel" };
constexpr op_signature     signature       = { "dw_delta_tree", operands, n_src };
extern const op_descriptor on_cpu, on_cuda;
} // namespace delta_tree

// The gated delta rule along a chain of one sequence, as delta-net.h has it, from the state of a cell; `target` becomes
// the state behind it. Rounded as ggml's GATED_DELTA_NET and tree-ops.h round.
//   dst[S, H, n]; of one row with z and norm f32[S H + n_gated(S H)]: behind y what dw_delta_output takes as `gated`,
//   on CUDA alone
//   q, k [S, Hk, n]; v [S, H, n]; g, beta [1, H, n]; states [S * S * H, n_cells]; cells i32, the first counts;
//   target [S * S * H], of the states; z as v, contiguous, norm [S], both or neither, nullptr
namespace delta_step {
enum src { q, k, v, g, beta, states, cells, target, z, norm, n_src };
constexpr const char * operands[n_src] = { "q", "k", "v", "g", "beta", "states", "cells", "target", "z", "norm" };

// floats that `width` values of 8 bits take, with a scale, a sum and a sum of squares for each 32: gated.cuh
constexpr int64_t n_gated(int64_t width) {
    return width / 4 + width / 16 + width / 32;
}

constexpr op_signature     signature = { "dw_delta_step", operands, n_src, /*n_optional*/ 2 };
extern const op_descriptor on_cpu, on_cuda;
} // namespace delta_step

// The norm in front of an output head, whose rows others read, too:
//   dst[D, n] = rms_norm(x) * norm
//   x [D, n]; norm [D]
//   settings: epsilon
namespace norm_of_rows {
enum src { x, norm, n_src };
constexpr const char *     operands[n_src] = { "x", "norm" };
constexpr op_signature     signature       = { "dw_norm", operands, n_src };
extern const op_descriptor on_cpu, on_cuda;
} // namespace norm_of_rows

// A product with large weights, the output head above all:
//   dst[rows, n] = weights x, of the columns of x that `picked` names
//   x [K, m]; weights [K, rows]; picked i32[n], 0 to m - 1 each, or nullptr: all in order, n = m
namespace product_of_rows {
enum src { x, weights, picked, n_src };
constexpr const char *     operands[n_src] = { "x", "weights", "picked" };
constexpr op_signature     signature       = { "dw_product", operands, n_src, /*n_optional*/ 1 };
extern const op_descriptor on_cpu, on_cuda;
} // namespace product_of_rows

// The end of a gated-delta-net layer:
//   dst[D, n] = residual + weights (rms_norm(y) * norm * silu(z)), the norm over each head
//   y, z [S, H, n] contiguous, S a multiple of 32; norm [S]; weights [S H, D]; residual [D, n]
//   gated: the result of dw_delta_step that y is the beginning of, one row with the same z and norm; or nullptr
//   settings: epsilon
namespace delta_output {
enum src { y, z, norm, weights, residual, gated, n_src };
constexpr const char *     operands[n_src] = { "y", "z", "norm", "weights", "residual", "gated" };
constexpr op_signature     signature       = { "dw_delta_output", operands, n_src, /*n_optional*/ 1 };
extern const op_descriptor on_cpu, on_cuda;
} // namespace delta_output

// Queries of an attention layer, and its keys and values on their way into the KV cache:
//   dst[S H n] = turned(rms_norm(q) * q_norm), the norm over each head, in the order of q; rows of k_cache become
//   turned(rms_norm(k) * k_norm), those of v_cache v. Pairs of the first n_dims values of a head turn by
//   position * scale * base^(-2 pair / n_dims): rotation.h
//   q [S, H, n], k [S, Hk, n], v [V, n]: heads and rows may be strided; q_norm, k_norm [S]
//   positions i32[n], or with sections i32[4 n], the n of each section side by side
//   k_cells, v_cells i64[n]: rows of the caches; k_cache [S Hk, cells], v_cache [V, cells], F16, F32, or Q8_0 if S is a
//   multiple of 32
//   Positions and cells are inputs of the graph. S is max_head at most, n_dims even, V a multiple of S.
//   k_hadamard: turned queries and keys are transformed last (hadamard.h), v_hadamard: so is v
//   settings: epsilon, n_dims, sections, base, scale, k_hadamard, v_hadamard
namespace attention_heads {
enum src { q, q_norm, k, k_norm, v, positions, k_cells, k_cache, v_cells, v_cache, n_src };
constexpr const char *     operands[n_src] = { "q",         "q_norm",  "k",       "k_norm",  "v",
                                               "positions", "k_cells", "k_cache", "v_cells", "v_cache" };
constexpr op_signature     signature       = { "dw_attention_heads", operands, n_src };
extern const op_descriptor on_cpu, on_cuda;
} // namespace attention_heads

// Attention over a KV cache:
//   dst[S, H, n, n_streams] = sum of p v over the cells of the row's stream, p = softmax(scale q k + mask)
//   q [S, n, H, n_streams]; k, v [S, n_kv, Hk, n_streams], both F16 or both Q8_0; all may be strided
//   mask F16 [n_kv, n, 1, n_streams]
//   is_attention_size(S); H a multiple of Hk; n n_streams at most max_rows; mask and tree are inputs of the graph
//   gate as of dw_attention_output, or nullptr. dst may be f32[S H n + n n_gated(S H)], and with a gate it must be:
//   behind the sums is what that op takes as `gated`, undefined on a CPU
//   v_hadamard: the sums are transformed last (hadamard.h), 64 values at a time on CUDA
//   settings: scale, v_hadamard
// Cells are added up in parts that their places alone make (attention-parts.h). With `tree`, as in tree-ops.h, the k-th
// of a row's path counts in the place where plain decoding has it, so that a draft's bits are those of plain decoding.
namespace flash_attention {
enum src { q, k, v, mask, tree, gate, n_src };
constexpr const char * operands[n_src] = { "q", "k", "v", "mask", "tree", "gate" };

// floats that `width` values of 8 bits of a row take: activations::quantised in rows.cuh
constexpr int64_t n_gated(int64_t width) {
    return (width + 32) / 4 + 2 * ((width / 32 + 1) / 2 * 2 + 2);
}

constexpr op_signature     signature = { "dw_flash_attention", operands, n_src, /*n_optional*/ 2 };
extern const op_descriptor on_cpu, on_cuda;
} // namespace flash_attention

// The end of an attention layer:
//   dst[D, n] = residual + weights (y * sigmoid(gate)), without a gate residual + weights y
//   y [S H, n] contiguous; weights [S H, D]; residual [D, n]; gate [S, H, n], heads and rows may be strided, or nullptr
//   gated: the result of dw_flash_attention that y is the beginning of, with the same gate or none; or nullptr
//   S is a multiple of 32.
namespace attention_output {
enum src { y, weights, residual, gate, gated, n_src };
constexpr const char *     operands[n_src] = { "y", "weights", "residual", "gate", "gated" };
constexpr op_signature     signature       = { "dw_attention_output", operands, n_src, /*n_optional*/ 2 };
extern const op_descriptor on_cpu, on_cuda;
} // namespace attention_output

} // namespace dw::layer_parts
