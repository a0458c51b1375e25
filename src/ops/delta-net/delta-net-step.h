// One token of the gated delta rule for a few rows of the state: what delta-net.cpp and tree-ops.cpp share.
// Built from ggml's own vector functions in the order of its GATED_DELTA_NET, so that results are bit-equal to it.
// Test: tests/ops/test_delta_net.py.

#pragma once

#include "ggml-cpu-impl.h"
#include "vec.h"

#include <cstdint>

namespace dw {

// rows walked side by side: one alone waits for the latency of each step
constexpr int64_t delta_block = 16;
// longest row
constexpr int64_t delta_max_row = 256;

// where the vector of head h, token t and sequence s of x begins; heads repeat where x has fewer
inline const float * vector_at(const ggml_tensor * x, int64_t h, int64_t t, int64_t s = 0) {
    return (const float *) ((const char *) x->data + h % x->ne[1] * x->nb[1] + t * x->nb[2] + s * x->nb[3]);
}

// from, to f32[n_rows][size], may be the same; k, q f32[size]; v, delta, out f32[n_rows].
//   to = from * decay;  delta = beta (v - to.k);  to += delta k;  out = to.q scale
inline void delta_step(int64_t n_rows, int64_t size, const float * from, float * to, float decay, const float * k,
                       const float * q, const float * v, float beta, float scale, float * delta, float * out) {
    for (int64_t i = 0; i < n_rows * size; ++i) {
        to[i] = from[i] * decay;
    }
    for (int64_t r = 0; r < n_rows; ++r) {
        ggml_vec_dot_f32((int) size, &delta[r], 0, to + r * size, 0, k, 0, 1);
        delta[r] = (v[r] - delta[r]) * beta;
    }
    for (int64_t r = 0; r < n_rows; ++r) {
        ggml_vec_mad_f32((int) size, to + r * size, k, delta[r]);
    }
    for (int64_t r = 0; r < n_rows; ++r) {
        ggml_vec_dot_f32((int) size, &out[r], 0, to + r * size, 0, q, 0, 1);
        out[r] *= scale;
    }
}

// Calls f(head, first, last) for this thread's share of the value rows of n_heads states.
template <typename F> void for_rows(int64_t n_heads, int64_t size, int ith, int nth, F f) {
    const int64_t n_rows = size * n_heads;
    const int64_t end    = n_rows * (ith + 1) / nth;
    for (int64_t row = n_rows * ith / nth; row < end;) {
        const int64_t head = row / size;
        const int64_t last = end < (head + 1) * size ? end : (head + 1) * size;
        f(head, row % size, last - head * size);
        row = last;
    }
}

} // namespace dw
