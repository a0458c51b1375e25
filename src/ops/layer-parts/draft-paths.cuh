// Where a row of a tree of drafts reads its keys and values, and where plain decoding would have them: layer-parts.h.
// Must not know: what is computed of them. Test: tests/ops/layer_kernels.py.

#pragma once

#include "ops/layer-parts/attention-parts.h"
#include "ops/layer-parts/layer-parts.h"

#include <climits>

namespace dw::layer_parts {

// Whether a row sees a place of the cache.
enum class sight { yes, no, as_masked };

// The cells of a row's path, root first: where keys and values of each node are, and where plain decoding would have
// stored them.
struct draft_path {
    int n; // 0: these are the same
    int from[max_rows], to[max_rows];

    // the cell that is read for a place
    __device__ __forceinline__ int source(int place) const {
        int cell = place;
        for (int k = 0; k < n; ++k) {
            cell = to[k] == place ? from[k] : cell;
        }
        return cell;
    }

    __device__ __forceinline__ sight of(int place) const {
        sight found = sight::as_masked;
        for (int k = 0; k < n; ++k) {
            found = to[k] == place ? sight::yes : found == sight::as_masked && from[k] == place ? sight::no : found;
        }
        return found;
    }
};

// The paths of up to n_most rows of a batch, in shared memory.
template <int n_most> struct draft_paths {
    int        parents[max_rows], depths[max_rows], cells[max_rows]; // of the batch, as in tree-ops.h
    draft_path each[n_most];
    int        lowest, highest; // cell or place of a path that differs from plain decoding's

    // Of rows [first, first + n) of the batch; tree [4][M], or nullptr. All threads of a block, n_most or more.
    __device__ __forceinline__ void find(const int32_t * tree, int tree_rows, int n_batch, int first, int n) {
        for (int i = threadIdx.x; tree && i < n_batch; i += blockDim.x) {
            parents[i] = tree[i];
            depths[i]  = tree[tree_rows + i];
            cells[i]   = tree[3 * tree_rows + i];
        }
        if (threadIdx.x == 0) {
            lowest  = INT_MAX;
            highest = -1;
        }
        __syncthreads();
        if (threadIdx.x < n_most) {
            each[threadIdx.x].n = 0;
            if (tree && (int) threadIdx.x < n) {
                find(each[threadIdx.x], first + threadIdx.x);
            }
        }
        __syncthreads();
    }

    // whether one of them reads or leaves out cells of [first, first + chunk)
    __device__ __forceinline__ bool touch(int first) const {
        return first <= highest && first + cells_of_a_chunk > lowest;
    }

  private:
    __device__ __forceinline__ void find(draft_path & path, int node) {
        const int n    = depths[node] + 1;
        int       root = node;
        for (int k = n - 1; k >= 0; --k) {
            path.from[k] = cells[root];
            root         = k > 0 ? parents[root] : root;
        }
        for (int k = 0; k < n; ++k) {
            path.to[k] = cells[root + k];
            if (path.to[k] != path.from[k]) {
                path.n = n;
            }
        }
        for (int k = 0; k < path.n; ++k) {
            atomicMin(&lowest, min(path.to[k], path.from[k]));
            atomicMax(&highest, max(path.to[k], path.from[k]));
        }
    }
};

} // namespace dw::layer_parts
