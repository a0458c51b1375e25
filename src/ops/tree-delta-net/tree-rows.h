// How the tree ops read `tree` i32[M, 4] of tree-ops.h. Test: tests/ops/test_tree_ops.py.

#pragma once

#include "ggml.h"

#include <cstdint>

namespace dw {

struct tree_rows {
    explicit tree_rows(const ggml_tensor * tree) :
        max_rows(tree->ne[0]),
        parents((const int32_t *) tree->data),
        depths(parents + max_rows),
        preorder(depths + max_rows),
        cells(preorder + max_rows) {}

    int64_t         max_rows;
    const int32_t * parents;
    const int32_t * depths;
    const int32_t * preorder;
    const int32_t * cells;

    // rows of the path to `row`, root first: i32[depths[row] + 1]
    void path(int32_t row, int32_t * out) const {
        for (int32_t i = row; i >= 0; i = parents[i]) {
            out[depths[i]] = i;
        }
    }
};

} // namespace dw
