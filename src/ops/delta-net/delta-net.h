// GATED_DELTA_NET for small batches on CPU. Compiled inside the ggml-cpu target; called where ggml computes the op.

#pragma once

#include "ggml.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;

// The gated delta rule (arXiv:2412.06464) as ggml_gated_delta_net has it, one decay per head and token. Per head,
// with S f32[S_v][S_v] stored by value row (row j: the weights of output j over the keys):
//
//     S[j] *= exp(g);  S[j] += beta (v[j] - S[j].k) k;  out[j] = S[j].q / sqrt(S_v)
//
// A row never meets another, so each walks through all tokens while it lies in the first-level cache; ggml
// passes over the whole state four times a token. Same operations in the same order: bit-equal to ggml's.
//   q, k f32[S_k = S_v, H_k, n_tokens, n_seqs], v f32[S_v, H, n_tokens, n_seqs], g, beta f32[1, H, n_tokens, n_seqs],
//   state f32[S_v, S_v, H, n_seqs]
//   dst: out f32[S_v, H, n_tokens, n_seqs], then K = op_params[0] snapshots of the state, newest first, of which
//   the first min(K, n_tokens) are written
// Threads share out the rows.
//
// Returns false, having written nothing, unless params->use_ref is set, g is one value per head, and S_v <= 256.
// Test: tests/ops/test_delta_net.py (float64 oracle, bit-equality with ggml's own).
bool dw_op_delta_net(const struct ggml_compute_params * params, struct ggml_tensor * dst);

#ifdef __cplusplus
}
#endif
