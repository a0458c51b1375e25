// Where the factors that a layer's nodes leave behind lie (tree-ops.h): k [M][Hk][S], u [M][H][S], g [M][H], one after
// another, all f32. Who writes, reads or allocates them goes through this header: ops on CPU and CUDA,
// verify/tree_device.h. Must not know: nodes, devices. Test: tests/ops/test_tree_ops.py,
// tests/gpu/test_tree_ops_cuda.py.

#pragma once

#include <cstdint>

namespace dw {

// whether GPUs have kernels for a head's state of so many rows: ours and ggml-cuda's own
constexpr bool is_state_size(int64_t size) {
    return size == 16 || size == 32 || size == 64 || size == 128;
}

// sizes S, H, Hk, M of tree-ops.h; where a part begins, in values
struct tree_factors_layout {
    int64_t size, n_heads, n_key_heads, max_rows;

    int64_t u() const { return max_rows * n_key_heads * size; }
    int64_t g() const { return u() + max_rows * n_heads * size; }
    int64_t n_values() const { return g() + max_rows * n_heads; }
};

// the layout of n_values values, which tell how many key heads there are
inline tree_factors_layout tree_factors_of(int64_t n_values, int64_t size, int64_t n_heads, int64_t max_rows) {
    return { size, n_heads, (n_values / max_rows - n_heads * size - n_heads) / size, max_rows };
}

// the parts of factors at `data`
struct tree_factors {
    tree_factors(float * data, const tree_factors_layout & layout) :
        k(data),
        u(data + layout.u()),
        g(data + layout.g()),
        end(data + layout.n_values()) {}

    float * k;
    float * u;
    float * g;
    float * end; // in the scratch of dw_tree_delta_net its output follows
};

} // namespace dw
