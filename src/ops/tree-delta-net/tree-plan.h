// In which order a block walks over the tree of one sequence, and which states it keeps meanwhile. For
// tree-delta-net.cu; must not know what a state is. Test: tests/ops/tree_kernels.py.

#pragma once

#include <cstdint>

namespace dw {

constexpr int max_tree_nodes = 64; // of one sequence

// What to do with a node, in preorder: its number, and flags. It follows the node before it, unless it begins anew.
using tree_step                = uint32_t;
constexpr tree_step node_mask  = 0xff;
constexpr tree_step from_root  = 0x100; // from the sequence's state
constexpr tree_step from_kept  = 0x200; // from what was kept last, its parent's
constexpr tree_step drops_kept = 0x400; // and which nobody needs afterwards
constexpr tree_step keeps      = 0x800; // for children that do not follow at once

struct tree_plan {
    tree_step steps[max_tree_nodes + 1]; // one behind the last one, so that it can be read ahead
    int8_t    parents[max_tree_nodes];
    int8_t    order[max_tree_nodes];
    int       last_child[max_tree_nodes]; // where in the order it is; -1: none
};

// all threads of a block, for the tree of one sequence
static __device__ void make_plan(tree_plan & p, const int32_t * parents, const int32_t * preorder, int first_row,
                                 int n) {
    const int i = threadIdx.x;
    if (i < n) {
        const int parent = parents[first_row + i];
        p.parents[i]     = (int8_t) (parent < 0 ? -1 : parent - first_row);
        p.order[i]       = (int8_t) (preorder[first_row + i] - first_row);
        p.last_child[i]  = -1;
    }
    if (i == 0) {
        p.steps[n] = 0;
    }
    __syncthreads();
    const int node   = i < n ? p.order[i] : 0;
    const int parent = p.parents[node];
    if (i < n && parent >= 0) {
        atomicMax(&p.last_child[parent], i);
    }
    __syncthreads();
    if (i < n) {
        const bool returns = parent >= 0 && p.order[i - 1] != parent;
        p.steps[i]         = (tree_step) node | (parent < 0 ? from_root : 0) | (returns ? from_kept : 0) |
                     (returns && p.last_child[parent] == i ? drops_kept : 0) | (p.last_child[node] > i + 1 ? keeps : 0);
    }
    __syncthreads();
}

} // namespace dw
