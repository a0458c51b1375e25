// The rows of a verify as data: which sees which, where they lie, in which order states walk them. Devices get parents,
// depths, preorder and cells (tree_state.h). Ancestor sets stay on the host, where they become the attention's mask. No
// ggml types.
// Must not know: devices, contexts, graphs. Test: tests/model/engine/test_trees.py, test_sequences.py.

#pragma once

#include "tree/token_tree.h"

#include <cstdint>
#include <vector>

namespace draftwood {

// One sequence of a verify: its tree, whose root is at position pos.
struct planned_tree {
    int32_t            seq;
    const token_tree * tree;
    int32_t            pos;
};

struct verify_plan {
    // Rows of one sequence: n_each from `first` on. Rows beyond the tree's nodes are copies of its last node.
    struct sequence {
        int32_t seq;
        int32_t pos;   // of the root
        int32_t first; // row of the root
    };
    std::vector<sequence> sequences;
    int32_t               n_each   = 0;
    bool                  branches = false; // some rows do not see all those of their sequence before them

    // by row of the batch
    std::vector<int32_t>  parents;   // row; -1: follows what the memory holds
    std::vector<int32_t>  depths;    // of the root: 0
    std::vector<int32_t>  preorder;  // the i-th row that a state walks: parents first, the largest subtree last
    std::vector<uint64_t> ancestors; // bit j: the j-th row of its sequence; the row itself included
    std::vector<int64_t>  cells;     // of the KV cache, counted through all streams; empty until placed
    int64_t               n_stream_cells = 0; // of one stream

    int32_t n_rows() const { return n_each * (int32_t) sequences.size(); }
    int32_t stream_cell(int32_t row) const { return (int32_t) (cells[row] % n_stream_cells); }
    bool    sees(int32_t row, int32_t j) const { return (ancestors[row] >> j & 1) != 0; } // j-th row of its sequence
    // the sequence's rows; nullptr: the verify did not hold it
    const sequence * find(int32_t seq) const;
};

// Trees of up to n_rows nodes, n_rows rows each. Without cells.
verify_plan plan_verify(const std::vector<planned_tree> & trees, int32_t n_rows);

// What a commit of a path of tree nodes (root first) does.
struct commit_plan {
    std::vector<int32_t>  applied; // i32[1 + n]: n, then the path's rows: their factors go into the state
    std::vector<int32_t>  moves;   // i32[1 + 2 n]: n, then pairs of cells (from, to), counted through all streams
    std::vector<int32_t>  tokens;  // i32[n] that stay
    std::vector<uint32_t> cells;   // of the sequence's rows, in their stream
};
commit_plan plan_commit(const verify_plan & verify, const verify_plan::sequence & rows, const token_tree & tree,
                        const std::vector<int32_t> & path);

} // namespace draftwood
