// Logits of experts and rows normalised, on CUDA: the router with the norm in front of it.
// Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/rows.cuh"

namespace dw::layer_parts {

// A layer's router with the norm before it; the shared expert's row, nullptr: it has none.
struct router_weights {
    const float * norm;
    const void *  rows;
    const void *  shared;

    template <ggml_type type> __device__ const void * row(int expert, int n_experts, int width) const {
        const size_t bytes = type == GGML_TYPE_F32 ? sizeof(float) : sizeof(uint16_t);
        return expert == n_experts ? shared : (const char *) rows + (size_t) expert * width * bytes;
    }
};

// Pairs of sums over lanes, all at once: each step waits for one exchange.
template <int n> __device__ __forceinline__ void add_lanes(float2 (&sums)[n]) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
        for (int i = 0; i < n; ++i) {
            sums[i].x += __shfl_xor_sync(0xffffffff, sums[i].x, offset);
            sums[i].y += __shfl_xor_sync(0xffffffff, sums[i].y, offset);
        }
    }
}

// Of each row its squares and its product with the weights, a sum a warp. A team asks for at_once of its rows together.
template <int at_once> __device__ __forceinline__ void sum_rows(const float * x, int64_t stride, int n, int n_teams,
                                                                const team & by, const groups & weights, int width,
                                                                float2 (&sums)[max_rows][32]) {
    if constexpr (at_once == 1) {
#pragma unroll 2
        for (int row = by.number; row < n; row += n_teams) {
            const groups values  = groups::of<GGML_TYPE_F32>(x + row * stride, width, by);
            const float  squares = sum_of_lanes(values.dot(values)), product = sum_of_lanes(values.dot(weights));
            if (threadIdx.x % 32 == 0) {
                sums[row][by.warp] = make_float2(squares, product);
            }
        }
    } else {
#pragma unroll 1
        for (int first = by.number; first < n; first += at_once * n_teams) {
            groups values[at_once];
            float2 found[at_once]; // squares, product
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                values[i] = groups::of<GGML_TYPE_F32>(x + min(first + i * n_teams, n - 1) * stride, width, by);
            }
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                found[i] = make_float2(values[i].dot(values[i]), values[i].dot(weights));
            }
            add_lanes(found);
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                if (threadIdx.x % 32 == 0 && first + i * n_teams < n) {
                    sums[first + i * n_teams][by.warp] = found[i];
                }
            }
        }
    }
}

// logits [n][E + 1], the last one the shared expert's; h, the rows normalised. A block an expert, whose teams share the
// rows. E more blocks, if the grid has them, make the next router's logits of the same rows, behind all others.
template <ggml_type type, int at_once> __global__ void __launch_bounds__(most_threads / at_once, at_once)
    route(const float * x, int64_t stride, int n, router_weights own, router_weights next, int n_experts, float epsilon,
          int n_teams, float * logits, activations h) {
    __shared__ float2 sums[max_rows][32];
    ggml_cuda_pdl_lc();
    const team           by     = team::of_warps((int) blockDim.x / 32 / n_teams);
    const int            n_own  = n_experts + 1;
    const bool           is_own = blockIdx.x < n_own;
    const int            expert = is_own ? blockIdx.x : blockIdx.x - n_own;
    const router_weights from   = is_own ? own : next;
    const groups         scaled = groups::of<GGML_TYPE_F32>(from.norm, h.width, by);
    const groups weights = groups::of<type>(from.row<type>(expert, n_experts, h.width), h.width, by).times(scaled);
    logits += is_own ? 0 : n * n_own;
    ggml_cuda_pdl_sync();
    sum_rows<at_once>(x, stride, n, n_teams, by, weights, h.width, sums);
    __syncthreads();
    const auto total = [&](int row) {
        float2 sum = make_float2(0.0f, 0.0f);
        for (int warp = 0; warp < by.n_warps; ++warp) {
            sum.x += sums[row][warp].x;
            sum.y += sums[row][warp].y;
        }
        return make_float2(rsqrtf(sum.x / h.width + epsilon), sum.y);
    };
    for (int row = threadIdx.x; row < n; row += blockDim.x) {
        const float2 found           = total(row);
        logits[row * n_own + expert] = found.y * found.x;
    }
    const int n_pieces = per_thread * by.n_warps; // of a row of h, a warp's each: blocks share all of them
    for (int i = expert; is_own && by.number == 0 && i < n * n_pieces; i += n_own) {
        const int row = i / n_pieces, piece = i % n_pieces;
        if (by.warp == piece % by.n_warps) {
            const int    at       = groups::index(piece / by.n_warps, by);
            const bool   is_there = 4 * at < h.width;
            const float4 v = four_or_zeros(x + row * stride, at, is_there), w = four_or_zeros(own.norm, at, is_there);
            h.store(row, at, times(times(v, w), total(row).x), is_there);
        }
    }
}

} // namespace dw::layer_parts
