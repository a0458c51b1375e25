// How a block finds the K best tokens of a row where more may be as good than it keeps, as of equal or sorted
// logits, or where few are numbers. Slow, for what a model hardly gives. Must not know: kernels.
// Test: tests/ops/test_top_rows.py, tests/gpu/test_tree_ops_cuda.py.

#pragma once

#include "ops/top-rows/choice.cuh"

namespace dw::top_rows {

// f(key) of a row's tokens that are not under a key.
template <typename F> __device__ void each_from(const float * logits, int n_vocab, token_key bound, F f) {
    constexpr int at_once = 8;
    for (int first = threadIdx.x; first < n_vocab; first += at_once * n_threads) {
        float values[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            values[i] = first + i * n_threads < n_vocab ? __ldcg(logits + first + i * n_threads) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            const int       id  = first + i * n_threads;
            const token_key key = key_of(order_of(values[i]), id);
            if (id < n_vocab && key >= bound) {
                f(key);
            }
        }
    }
}

// How many of them there are. All threads.
__device__ __forceinline__ int count_from(choice & s, const float * logits, int n_vocab, token_key bound) {
    int n = 0;
    each_from(logits, n_vocab, bound, [&](token_key) { ++n; });
    n = sum_of_lanes(n);
    __syncthreads(); // all have read what was there
    if (threadIdx.x == 0) {
        s.n_keys = 0;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        atomicAdd(&s.n_keys, n);
    }
    __syncthreads();
    return s.n_keys;
}

// Lists tokens anew. Halves find a bound that leaves few; the whole row is read each time.
static __device__ __noinline__ void list_all(choice & s, const float * logits, int n_vocab, int k) {
    token_key low = (token_key) s.bound << 32, above = (token_key) s.best + 1 << 32; // k or more are not under low
    for (int n = n_listed + 1; n > n_listed;) {
        const token_key bound = low + (above - low) / 2;
        n                     = count_from(s, logits, n_vocab, bound);
        if (n >= k) {
            low = bound;
        } else {
            above = bound;
            n     = n_listed + 1;
        }
    }
    __syncthreads();
    s.begin_keys();
    __syncthreads();
    each_from(logits, n_vocab, low, [&](token_key key) { s.keys[atomicAdd(&s.n_keys, 1)] = key; });
    __syncthreads();
}

} // namespace dw::top_rows
