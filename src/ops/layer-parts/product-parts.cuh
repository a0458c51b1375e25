// What one launch of products multiplies: weights, where their products go, and how a block divides itself.
// Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/pieces.cuh"

namespace dw::layer_parts {

constexpr int most_warps       = 8; // of a team
constexpr int tiles_of_a_warp  = 2; // of a strip, at widths of up to 4,096
constexpr int most_block_warps = 16;
constexpr int max_parts        = 8;

enum class end_of_product { as_is, sigmoid, softplus, add };

// Weights [K, rows] and where their products go.
struct part {
    const char *   weights;
    int64_t        stride; // bytes of a row
    ggml_type      type;
    int            n_rows;
    int            first_team, n_teams; // of all that the launch has
    int            n_shares;            // warps of a row of float weights, which share the columns
    int            first_lone_row;      // among those of warps without a team; -1: teams have this part
    float *        out;                 // [n][out_stride]
    int64_t        out_stride;
    end_of_product end;
    const float *  a; // softplus: added before [rows]; add: the residual [n][a_stride]
    const float *  b; // softplus: multiplied with [rows]
    int64_t        a_stride;
};

struct parts {
    part each[max_parts];
    int  n, n_lone_rows; // parts; rows of warps without a team
};

// How a block divides its warps and its shared memory, in bytes: teams of n_warps with slots and sums of their own,
// then the activations that the block makes, if it does; then grids of its types, or a row that the warp without a team
// multiplies, if there are any.
struct block_plan {
    tile_plan tiles;
    int       n_warps, n_teams;
    int       bytes_of_team, activations_at, lone_row_at; // lone_row_at: -1 if it has no place
};

// What a product is added to, asked for before the product is there.
static __device__ __forceinline__ float residual_of(const part & of, int row, int column) {
    return of.end == end_of_product::add ? of.a[column * of.a_stride + row] : 0.0f;
}

// Asks for what the end of a product of a row reads, which may be in no cache.
static __device__ __forceinline__ void ask_for_end(const part & of, int row) {
    if (of.end == end_of_product::softplus) {
        ptx::prefetch_l2(of.a + row);
        ptx::prefetch_l2(of.b + row);
    }
}

static __device__ __forceinline__ float ended(const part & of, float sum, int row, float residual) {
    switch (of.end) {
        case end_of_product::sigmoid:
            return sigmoid(sum);
        case end_of_product::softplus: {
            const float x = sum + of.a[row];
            return (x > 20.0f ? x : logf(1.0f + expf(x))) * of.b[row];
        }
        case end_of_product::add:
            return residual + sum;
        default:
            return sum;
    }
}

} // namespace dw::layer_parts
