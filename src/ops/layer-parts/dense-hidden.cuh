// Hidden values of a dense network as in networks.cuh, of several rows: all blocks take the same rows, so each copies
// them into its shared memory once and multiplies one piece after another. The bits are make_hidden_all's.
// Test: tests/ops/test_cuda_layers.py, tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/networks.cuh"

namespace dw::layer_parts {

constexpr int most_dense_teams = 2; // of a block, a warp for each half of a strip
constexpr int least_dense_rows = 3; // fewer rows of 8 bits are read from L2 as fast

// Hidden values of every n_teams-th piece of 32, from piece `first` on. memory: the team's
template <ggml_type type, int n_columns, typename ready_type>
__device__ __forceinline__ void make_hidden_pieces(const arguments & a, const activations::quantised & x, int first,
                                                   int n_teams, const tile_plan & plan, const team & by, char * memory,
                                                   ready_type && ready) {
    const network & of = a.shared;
    const int  lane = threadIdx.x % 32, n_pieces = of.width / hidden_of_a_block, number = by.warp / halves_of_a_strip;
    const int  n_mine   = (n_pieces - first + n_teams - 1) / n_teams;
    const auto strip_of = [&](int i) {
        const int row = (first + i * n_teams) * hidden_of_a_block + number % 2 * tile_rows;
        return number < 2
                   ? strip{ of.gate.row(0, row), (int) of.gate.row_stride, tile_rows - 1, of.gate.width, of.gate.type }
                   : strip{ of.up.row(0, row), (int) of.up.row_stride, tile_rows - 1, of.gate.width, of.gate.type };
    };
    strips_of_warp<type, decltype(strip_of)> strips(memory + by.warp * plan.slots_of_a_warp, plan.n_slots, n_mine,
                                                    of.gate.width, by.warp % halves_of_a_strip, halves_of_a_strip,
                                                    strip_of);
    ready();
    float * const            of_halves = (float *) (memory + by.n_warps * plan.slots_of_a_warp);
    const sums_of<n_columns> none(x, lane, [&](int c) { return min(c, a.n - 1); });
    for (int i = 0; i < n_mine; ++i) {
        auto sums = none;
        strips.multiply(sums, i);
        by.meet(); // the piece before is stored
        store_sums(of_halves + by.warp * floats_of_sums<n_columns>, sums);
        by.meet();
        for (int c = by.warp; c < a.n; c += by.n_warps) {
            store_hidden<n_columns>(a, of_halves, c, c, (first + i * n_teams) * hidden_of_a_block);
        }
    }
}

// hidden = silu(gate h) * up h. Blocks: one a multiprocessor, or fewer.
template <int n_columns> __global__ void __launch_bounds__(32 * n_halves * most_dense_teams, 1)
    make_hidden_dense(const __grid_constant__ arguments a, tile_plan plan, int bytes_of_team, int rows_at) {
    extern __shared__ __align__(128) char memory[];
    ggml_cuda_pdl_lc();
    const int  warp = threadIdx.x / 32, number = warp / n_halves, n_of_block = blockDim.x / (32 * n_halves);
    const team by{ number, warp % n_halves, n_halves };
    const auto x = activations::quantised::in(memory + rows_at, a.n, a.h.width);
    with_type</*has_byte_tiles*/ false>(a.shared.gate.type, [&](auto type_is) {
        constexpr ggml_type type = decltype(type_is)::value;
        if constexpr (!are_floats<type>) {
            // teams of a block have pieces far from each other, so that the first ones are spread over all blocks
            make_hidden_pieces<type, n_columns>(a, x, number * gridDim.x + blockIdx.x, n_of_block * gridDim.x, plan, by,
                                                memory + number * bytes_of_team, [&] {
                                                    ggml_cuda_pdl_sync();
                                                    copy_by_block(x.scales, a.h.scales, x.bytes(a.n, x.width));
                                                    __syncthreads();
                                                });
        }
    });
}

template <int n_columns> static bool launch_dense_of(const arguments & a, cudaStream_t stream) {
    const network & of       = a.shared;
    const int       n_pieces = of.width / hidden_of_a_block, n_blocks = std::min(n_pieces, n_multiprocessors());
    const int       n_teams  = std::min<int>(most_dense_teams, dw::n_blocks(n_pieces, n_blocks));
    const size_t    of_sums  = sizeof(float) * n_halves * floats_of_sums<n_columns>;
    const size_t    of_rows  = activations::quantised::bytes(a.n, a.h.width);
    const auto      of_teams = [&](int n) {
        return tile_launch(&of.gate.type, 1, INT_MAX, n * n_halves, n * of_sums + of_rows);
    };
    for (int n = n_teams; n > 0; --n) {
        const tile_launch with = of_teams(n);
        if (with.bytes <= shared_memory_of_block() && with.plan.n_slots == most_slots) {
            const int bytes_of_team = (int) (n_halves * with.plan.slots_of_a_warp + of_sums);
            dw::launch_kernel<make_hidden_dense<n_columns>>(
                { dim3(n_blocks), dim3(32 * n_halves * n), with.bytes, stream }, a, with.plan, bytes_of_team,
                n * bytes_of_team);
            return true;
        }
    }
    return false;
}

// Launches it for several rows and weights that tensor cores read as they lie, where shared memory has room for them,
// and says whether it did.
static bool launch_dense_hidden(const arguments & a, cudaStream_t stream) {
    if (a.n < least_dense_rows || is_float(a.shared.gate.type) || is_byte_tiled(a.shared.gate.type)) {
        return false;
    }
    return a.n <= 8 ? launch_dense_of<8>(a, stream) : launch_dense_of<16>(a, stream);
}

} // namespace dw::layer_parts
