// dw_tree_commit_state, dw_tree_commit_rows and dw_tree_commit_columns on CUDA: tree-ops.h, tree-attention.h. Bound by
// memory: a state is read once and written once, and kept in registers in between.

#include "ops/delta-net/delta-step-cuda.h"
#include "ops/door/launch.h"
#include "ops/tree-attention/tree-attention.h"
#include "ops/tree-delta-net/tree-factors.h"
#include "ops/tree-delta-net/tree-ops.h"

#include <cstdint>

namespace state_op   = dw::tree_commit_state;
namespace rows_op    = dw::tree_commit_rows;
namespace columns_op = dw::tree_commit_columns;

namespace {

constexpr int n_threads = 128;
constexpr int n_rows    = 4; // of a head's state that a thread works on; elements of each: as one access takes

template <int n> struct vector;
template <> struct vector<1> {
    using type = float;
};
template <> struct vector<4> {
    using type = float4;
};

// some neighbours of a row of the state
template <int n> union elements {
    typename vector<n>::type all;
    float                    each[n];
};

struct state_arguments {
    float *         states;
    int64_t         head, layer; // strides in values
    const float *   k;
    const float *   u;
    const float *   g;
    int64_t         layer_of_factors; // stride in values
    const int32_t * path;
    int             size, n_heads, n_key_heads;
};

// grid: part of a head's state, head, layer. The same sums in the same order as in tree-delta-net.cu; is_small: as
// there.
template <int n, bool is_small> __global__ void __launch_bounds__(n_threads)
    tree_commit_state(const state_arguments a) {
    using access = typename vector<n>::type;
    __shared__ int   nodes[n_threads]; // of the path
    __shared__ float decays[n_threads];
    const int        head    = blockIdx.y;
    const int        per_row = a.size / n;
    const int        i       = blockIdx.x * n_threads + threadIdx.x;
    const int        at      = i % per_row;          // of a row
    const int        first   = i / per_row * n_rows; // row
    const int64_t    factors = blockIdx.z * a.layer_of_factors;
    float * const    state   = a.states + blockIdx.z * a.layer + head * a.head;
    elements<n>      s[n_rows];
#pragma unroll
    for (int r = 0; r < n_rows; ++r) {
        if (first + r < a.size) {
            s[r].all = ((const access *) (state + (int64_t) (first + r) * a.size))[at];
        }
    }
    const int n_path = a.path[0];
    for (int begin = 0; begin < n_path; begin += n_threads) {
        const int n_here = min(n_threads, n_path - begin);
        __syncthreads(); // the last ones were used
        if (threadIdx.x < n_here) {
            const int node      = a.path[1 + begin + threadIdx.x];
            nodes[threadIdx.x]  = node;
            decays[threadIdx.x] = expf(a.g[factors + (int64_t) node * a.n_heads + head]);
        }
        __syncthreads();
#pragma unroll 4
        for (int p = 0; p < n_here; ++p) {
            const int64_t node  = nodes[p];
            const float   decay = decays[p];
            const float * u     = a.u + factors + (node * a.n_heads + head) * a.size;
            elements<n>   k;
            k.all = ((const access *) (a.k + factors + (node * a.n_key_heads + head % a.n_key_heads) * a.size))[at];
#pragma unroll
            for (int r = 0; r < n_rows; ++r) {
                const float delta = first + r < a.size ? u[first + r] : 0.0f;
#pragma unroll
                for (int e = 0; e < n; ++e) {
                    s[r].each[e] = dw::delta_step<is_small>(s[r].each[e], decay, k.each[e], delta);
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < n_rows; ++r) {
        if (first + r < a.size && n_path > 0) {
            ((access *) (state + (int64_t) (first + r) * a.size))[at] = s[r].all;
        }
    }
}

// Where a cell's units lie, in bytes: one stream of cells after another.
struct cell_layout {
    int64_t n_cells, stream, cell, unit, layer;

    template <typename T> __device__ T * at(void * data, int cell_index, int64_t i) const {
        return (T *) ((char *) data + cell_index / n_cells * stream + cell_index % n_cells * cell + i * unit);
    }
};

// A thread moves one unit of each cell, one move after another. Some are read at once; of these, a cell that one of
// them has written before is taken from there. grid: units, layer.
template <typename T> __global__ void __launch_bounds__(n_threads)
    tree_commit_cells(void * data, const cell_layout cells, const int32_t * moves, int64_t n_units) {
    constexpr int n_at_once = 8;
    const int64_t i         = (int64_t) blockIdx.x * n_threads + threadIdx.x;
    const int     n_moves   = moves[0];
    if (i >= n_units) {
        return;
    }
    data = (char *) data + blockIdx.y * cells.layer;
    for (int begin = 0; begin < n_moves; begin += n_at_once) {
        int from[n_at_once], to[n_at_once];
        T   value[n_at_once];
#pragma unroll
        for (int m = 0; m < n_at_once; ++m) {
            const bool there = begin + m < n_moves;
            from[m]          = there ? moves[1 + 2 * (begin + m)] : -1;
            to[m]            = there ? moves[2 + 2 * (begin + m)] : -1;
            if (there) {
                value[m] = *cells.at<T>(data, from[m], i);
            }
        }
#pragma unroll
        for (int m = 1; m < n_at_once; ++m) {
#pragma unroll
            for (int before = 0; before < m; ++before) {
                if (from[m] == to[before]) {
                    value[m] = value[before];
                }
            }
        }
#pragma unroll
        for (int m = 0; m < n_at_once; ++m) {
            if (to[m] >= 0) {
                *cells.at<T>(data, to[m], i) = value[m];
            }
        }
    }
}

template <typename T> void move_cells(const ggml_tensor * cache, const cell_layout & cells, const int32_t * moves,
                                      int64_t n_units, cudaStream_t stream) {
    const dim3 grid(dw::n_blocks(n_units, n_threads), (unsigned) cache->ne[3]);
    tree_commit_cells<T><<<grid, n_threads, 0, stream>>>(cache->data, cells, moves, n_units);
}

bool takes_state(const ggml_tensor * dst) {
    return dw::is_f32(dst) && dw::is_f32(dst->src[state_op::factors]) && dw::is_i32(dst->src[state_op::path]) &&
           dst->nb[1] == dst->ne[0] * sizeof(float);
}

void launch_state(const dw::launch_context & with, ggml_tensor * dst) {
    const ggml_tensor *           factors = dst->src[state_op::factors];
    const ggml_tensor *           path    = dst->src[state_op::path];
    const int64_t                 size    = dst->ne[0];
    const int64_t                 n_heads = dst->ne[2];
    const dw::tree_factors_layout layout  = dw::tree_factors_of(factors->ne[0], size, n_heads, path->ne[0] - 1);
    const dw::tree_factors        kept(dw::data_of<float>(factors), layout);
    const uintptr_t               odd  = (uintptr_t) dst->data | dst->nb[3] | (uintptr_t) kept.k | factors->nb[1];
    const bool                    wide = size % 4 == 0 && odd % 16 == 0;

    const state_arguments a = { dw::data_of<float>(dst),
                                dw::stride_of(dst, 2),
                                dw::stride_of(dst, 3),
                                kept.k,
                                kept.u,
                                kept.g,
                                dw::stride_of(factors, 1),
                                dw::data_of<int32_t>(path),
                                (int) size,
                                (int) n_heads,
                                (int) layout.n_key_heads };
    const dim3 grid(dw::n_blocks(size / (wide ? 4 : 1) * dw::n_blocks(size, n_rows), n_threads), (unsigned) n_heads,
                    (unsigned) dst->ne[3]);
    const bool is_small = size <= dw::small_head;
    const auto kernel   = wide ? (is_small ? tree_commit_state<4, true> : tree_commit_state<4, false>)
                               : (is_small ? tree_commit_state<1, true> : tree_commit_state<1, false>);
    kernel<<<grid, n_threads, 0, with.stream>>>(a);
}

bool takes_rows(const ggml_tensor * dst) { // cells are counted through all streams
    return dst->nb[0] == ggml_type_size(dst->type) && dst->nb[1] == ggml_row_size(dst->type, dst->ne[0]) &&
           dst->nb[2] == dst->nb[1] * dst->ne[1] && dw::is_i32(dst->src[rows_op::moves]);
}

void launch_rows(const dw::launch_context & with, ggml_tensor * dst) {
    const int32_t * moves = dw::data_of<int32_t>(dst->src[rows_op::moves]);
    const int64_t   row = (int64_t) dst->nb[1], layer = (int64_t) dst->nb[3];
    const auto      cells = [&](int64_t unit) { return cell_layout{ dst->ne[1] * dst->ne[2], 0, row, unit, layer }; };
    const uintptr_t odd   = (uintptr_t) dst->data | (uintptr_t) row | (uintptr_t) layer;
    if (odd % 16 == 0) {
        move_cells<uint4>(dst, cells(16), moves, row / 16, with.stream);
    } else if (odd % 2 == 0) {
        move_cells<uint16_t>(dst, cells(2), moves, row / 2, with.stream);
    } else {
        move_cells<uint8_t>(dst, cells(1), moves, row, with.stream);
    }
}

bool takes_columns(const ggml_tensor * dst) {
    return (dst->type == GGML_TYPE_F32 || dst->type == GGML_TYPE_F16 || dst->type == GGML_TYPE_BF16) &&
           dw::is_i32(dst->src[columns_op::moves]);
}

void launch_columns(const dw::launch_context & with, ggml_tensor * dst) {
    const int32_t *   moves = dw::data_of<int32_t>(dst->src[columns_op::moves]);
    const cell_layout cells = { dst->ne[0], (int64_t) dst->nb[2], (int64_t) dst->nb[0], (int64_t) dst->nb[1],
                                (int64_t) dst->nb[3] };
    if (dst->type == GGML_TYPE_F32) {
        move_cells<uint32_t>(dst, cells, moves, dst->ne[1], with.stream);
    } else {
        move_cells<uint16_t>(dst, cells, moves, dst->ne[1], with.stream);
    }
}

} // namespace

const dw::op_descriptor state_op::on_cuda   = { state_op::signature, nullptr, takes_state, nullptr, launch_state };
const dw::op_descriptor rows_op::on_cuda    = { rows_op::signature, nullptr, takes_rows, nullptr, launch_rows };
const dw::op_descriptor columns_op::on_cuda = { columns_op::signature, nullptr, takes_columns, nullptr,
                                                launch_columns };
