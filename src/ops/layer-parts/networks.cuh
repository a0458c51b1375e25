// Hidden values of feed-forward networks, of experts that rows chose or of one that all rows take.
// Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/routing.cuh"

#include <type_traits>

namespace dw::layer_parts {

constexpr int hidden_of_a_block = 32; // values, a block of 8 bits
constexpr int hidden_warps      = 16;
constexpr int hidden_of_a_warp  = hidden_of_a_block / hidden_warps;

// weights [K, rows, experts]
struct matrix {
    const char * data;
    int64_t      row_stride, expert_stride; // bytes
    ggml_type    type;
    int          width; // K

    __host__ static matrix from(const ggml_tensor * t) {
        return { (const char *) t->data, (int64_t) t->nb[1], (int64_t) t->nb[2], t->type, (int) t->ne[0] };
    }
    __device__ __forceinline__ const char * row(int expert, int row) const {
        return data + expert * expert_stride + row * row_stride;
    }
};

// An expert's or the shared expert's.
struct network {
    matrix gate, up, down;
    int    first_up; // row of `up`
    int    width;    // hidden values
};

struct arguments {
    network       routed, shared;
    const float * logits; // of one row, which chooses in hide_all; nullptr: `chosen` was filled before
    int           n_experts;
    routes *      chosen; // nullptr: all rows take the shared network, and nothing else
    activations   h;      // rows
    activations   hidden; // by pair
    int           n, n_used;
};

// A group of pairs that take the same network; group -1 is all rows with the shared expert.
struct group {
    const network &   of;
    const arguments & all;
    int               index, expert, n_pairs;

    __device__ __forceinline__ group(const arguments & a, int i) :
        group(a, i, i < 0 ? 0 : a.chosen->experts[i], i < 0 ? a.n : a.chosen->n_pairs[i]) {}
    __device__ __forceinline__ group(const arguments & a, int i, int of_expert, int n) :
        of(i < 0 ? a.shared : a.routed),
        all(a),
        index(i),
        expert(of_expert),
        n_pairs(n) {}
    // a row that is alone has a group a rank
    __device__ __forceinline__ int pair(int i) const {
        return index < 0 ? i * (all.n_used + 1) + all.n_used : all.n == 1 ? index : all.chosen->pairs[index][i];
    }
    __device__ __forceinline__ int row(int i) const { return pair(i) / (all.n_used + 1); }
};

constexpr int most_columns = 4; // pairs that read weights together; few experts have more in a batch

// call(std::integral_constant<int, c>) with the least c that holds n, for parts of at most most_columns
template <bool is_single, typename call_type> __device__ __forceinline__ void with_columns(int n, call_type && call) {
    if (is_single || n == 1) {
        call(std::integral_constant<int, 1>{});
    } else if constexpr (!is_single) {
        if (n == 2) {
            call(std::integral_constant<int, 2>{});
        } else {
            call(std::integral_constant<int, most_columns>{});
        }
    }
}

// Hidden value `value` of pairs [p0, p0 + n_columns) into `out` [pairs][hidden_of_a_block].
template <ggml_type type, int n_columns>
__device__ __forceinline__ void hide(const group & g, int p0, int value, int lane, float * out) {
    const char * rows[2] = { g.of.gate.row(g.expert, value), g.of.up.row(g.expert, g.of.first_up + value) };
    column       columns[n_columns];
    float        sums[2][n_columns] = {};
#pragma unroll
    for (int c = 0; c < n_columns; ++c) {
        columns[c] = g.all.h.of(g.row(min(p0 + c, g.n_pairs - 1)));
    }
    add_dots<type>(sums, rows, columns, g.of.gate.width, lane);
    add_lanes(sums);
#pragma unroll
    for (int c = 0; c < n_columns; ++c) {
        if (lane == c) {
            out[c * hidden_of_a_block + value % hidden_of_a_block] = silu(sums[0][c]) * sums[1][c];
        }
    }
}

// Ask for this warp's rows in L2.
__device__ __forceinline__ void prefetch_rows(const network & of, int expert, int first, int lane) {
    for (int i = 0; i < hidden_of_a_warp; ++i) {
        prefetch(of.gate.row(expert, first + i), (int) of.gate.row_stride, lane);
        prefetch(of.up.row(expert, of.first_up + first + i), (int) of.up.row_stride, lane);
    }
}

// hidden = silu(gate h) * up h. Blocks: (32 hidden values, group).
template <bool is_single> __global__ void __launch_bounds__(32 * hidden_warps, 2) hide_all(arguments a) {
    __shared__ float found[most_columns * hidden_of_a_block];
    ggml_cuda_pdl_lc();
    const int index = (int) blockIdx.y - 1, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int begin = blockIdx.x * hidden_of_a_block, first = begin + warp * hidden_of_a_warp;
    if (index < 0 && begin < a.shared.width) {
        prefetch_rows(a.shared, 0, first, lane);
    }
    ggml_cuda_pdl_sync();
    __shared__ choice_of_row own;
    if (is_single && a.logits) {
        if (warp == 0) {
            choose_row(a.logits, a.n_experts, a.n_used, lane, own.experts, own.weights);
        }
        __syncthreads();
        if (blockIdx.x == 0 && index < 0) {
            write_choice(own, a.n_used, a.chosen);
        }
    } else if (index >= 0 && index >= a.chosen->n_groups) {
        return;
    }
    const group g = is_single && index >= 0 ? group(a, index, own.experts[index], 1) : group(a, index);
    if (begin >= g.of.width) {
        return;
    }
    if (index >= 0) {
        prefetch_rows(g.of, g.expert, first, lane);
    }
    for (int p0 = 0; p0 < g.n_pairs; p0 += most_columns) {
        const int n_columns = min(most_columns, g.n_pairs - p0);
        with_type(g.of.gate.type, [&](auto type) {
            with_columns<is_single>(n_columns, [&](auto columns) {
#pragma unroll 1
                for (int i = 0; i < hidden_of_a_warp; ++i) {
                    hide<decltype(type)::value, decltype(columns)::value>(g, p0, first + i, lane, found);
                }
            });
        });
        __syncthreads();
        if (warp < n_columns) {
            const int  pair     = g.pair(p0 + warp);
            const bool is_there = lane < hidden_of_a_block / 4;
            const auto v =
                is_there ? ((const float4 *) (found + warp * hidden_of_a_block))[lane] : make_float4(0, 0, 0, 0);
            a.hidden.store(pair, begin / 4 + lane, v, is_there);
        }
        __syncthreads();
    }
}

} // namespace dw::layer_parts
