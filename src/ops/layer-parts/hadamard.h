// The orthonormal Walsh-Hadamard transform that llama.cpp applies to keys, queries and values around a quantised KV
// cache: outliers are spread over a block, products of keys and queries stay what they are, and it is its own inverse.
// Must not know: graphs. Test: tests/ops/test_layer_parts.py.

#pragma once

#include "ops/layer-parts/layer-settings.h"

#include <cmath>

namespace dw::layer_parts {

// Whether blocks of n values can be transformed in heads of `size`; 0: nothing is.
constexpr bool can_transform(int32_t n, int64_t size) {
    return n == 0 || (n >= 32 && n <= max_head && (n & (n - 1)) == 0 && size % n == 0);
}

// Whether heads of `size` go into a cache of this type, transformed n values at a time.
inline bool is_heads_cache(ggml_type type, int64_t size, int32_t n) {
    return is_heads_type(type) && size % ggml_blck_size(type) == 0 && can_transform(n, size);
}

// Transforms each n of n_values values in place, a multiple of n; the CPU's version.
inline void apply_hadamard(float * x, int64_t n_values, int32_t n) {
    for (int32_t offset = 1; offset < n; offset *= 2) {
        for (int64_t i = 0; i < n_values; ++i) {
            if ((i & offset) == 0) {
                const float a = x[i], b = x[i + offset];
                x[i]          = a + b;
                x[i + offset] = a - b;
            }
        }
    }
    for (int64_t i = 0; n > 0 && i < n_values; ++i) {
        x[i] /= std::sqrt((float) n);
    }
}

} // namespace dw::layer_parts
