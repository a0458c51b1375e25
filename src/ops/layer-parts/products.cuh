// Products of rows of activations with several weights in one launch. A team of warps multiplies 16 rows of quantised
// weights, each warp a part of them, or a warp a row (product-rows.cuh). Weights are asked for before the kernel waits
// for the one before it. One row of activations, or two late ones, are made by each block for itself, others, and all
// for byte-tiled weights, by a kernel before. How work is divided: product-list.cuh. Test:
// tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/door/chain.cuh"
#include "ops/door/launch.h"
#include "ops/layer-parts/gated.cuh"
#include "ops/layer-parts/late-inputs.cuh"
#include "ops/layer-parts/product-rows.cuh"

namespace dw::layer_parts {

// A team, or the whole block where that has no teams: its numbers are the block's then, and cost no registers.
template <bool has_teams> struct team_or_block {
    const team & of;

    __device__ __forceinline__ int  warp() const { return has_teams ? of.warp : threadIdx.x / 32; }
    __device__ __forceinline__ int  n_warps() const { return has_teams ? of.n_warps : blockDim.x / 32; }
    __device__ __forceinline__ int  thread() const { return has_teams ? of.thread() : threadIdx.x; }
    __device__ __forceinline__ int  n_threads() const { return has_teams ? of.n_threads() : blockDim.x; }
    __device__ __forceinline__ void meet() const {
        if (has_teams) {
            of.meet();
        } else {
            __syncthreads();
        }
    }
};

// Inputs that a block's warps make together, for quantised weights alone.
template <typename input_type> constexpr bool is_late_norm =
    std::is_same_v<input_type, late_normalised> || std::is_same_v<input_type, late_made>;
template <typename input_type> constexpr bool is_late_input =
    is_late_norm<input_type> || std::is_same_v<input_type, late_gated> || std::is_same_v<input_type, late_quants>;

// Rows that a kernel before has made, for weights of which some are byte-tiled.
struct activations_for_byte_tiles : activations {};

template <typename input_type> constexpr bool takes_byte_tiles = std::is_same_v<input_type, activations_for_byte_tiles>;
template <typename input_type> constexpr bool makes_input      = !std::is_base_of_v<activations, input_type>;

// Strips that a team multiplies between two meetings of its warps: one for each slot where blocks make their input.
template <typename input_type> constexpr int strips_at_once = is_late_input<input_type> ? most_slots : 1;

// A row's product, from the sums of a team's warps.
template <int n_columns>
__device__ __forceinline__ float sum_of_team(const float * of_warps, int strip, int column, int row, int n_warps) {
    const float * at  = of_warps + strip * n_warps * floats_of_sums<n_columns> + place_of_sum(column, row);
    float         sum = 0.0f;
#pragma unroll 4
    for (int w = 0; w < n_warps; ++w) {
        sum += at[w * floats_of_sums<n_columns>];
    }
    return sum;
}

// The rows of n_strips strips, at most n_at_once, `step` rows from each other, from the sums of warps. finished(sum,
// column, row).
template <int n_columns, int n_at_once, bool has_teams, typename call_type>
__device__ __forceinline__ void write_strips(const part & of, const float * of_warps, int first, int step, int n_strips,
                                             int n, const team_or_block<has_teams> & by, call_type && finished) {
    for (int i = by.thread(); i < n * n_at_once * tile_rows; i += by.n_threads()) {
        const int strip = i / tile_rows % n_at_once, column = i / tile_rows / n_at_once;
        const int row = first + strip * step + i % tile_rows;
        if (strip < n_strips && row < of.n_rows) {
            const float sum = sum_of_team<n_columns>(of_warps, strip, column, i % tile_rows, by.n_warps());
            of.out[column * of.out_stride + row] = finished(sum, column, row);
        }
    }
}

// One column times a team's strips, n_mine from strip `first` on, that are all asked for. A thread ends a row.
template <bool has_teams, typename rows_type, typename strips_type, typename factor_type>
__device__ __forceinline__ void multiply_asked_strips(const part & of, const rows_type & x, const strips_type & strips,
                                                      int first, int n_mine, const team_or_block<has_teams> & by,
                                                      float * of_warps, factor_type && factor) {
    const int              number = by.thread() / tile_rows, in_strip = by.thread() % tile_rows;
    const int              row      = (first + number * of.n_teams) * tile_rows + in_strip;
    const bool             ends     = number < n_mine && row < of.n_rows;
    const float            residual = ends ? residual_of(of, row, 0) : 0.0f;
    const sums_of<1, true> none(x, threadIdx.x % 32, [](int) { return 0; });
    strips.template multiply_asked<tiles_of_a_warp, /*rehearses*/ false>(
        none, [] {},
        [&](int i, const auto & sums) {
            store_sums(of_warps + (i * by.n_warps() + by.warp()) * floats_of_sums<1>, sums);
        });
    by.meet();
    if (ends) {
        const float sum = sum_of_team<1>(of_warps, number, 0, in_strip, by.n_warps());
        of.out[row]     = ended(of, factor(sum, 0), row, residual);
    }
}

// A part with quantised weights times n columns: strips of 16 rows, from strip `first` on every n_teams-th. Each warp
// has every so many pieces of a strip. memory: the team's. ready(): the activations, when they are there; factor(sum,
// c): a product of column c, then.
template <ggml_type type, int n_columns, int n_at_once, bool has_teams, typename ready_type, typename factor_type>
__device__ void multiply_strips(const part & of, int width, int first, int n, const tile_plan & plan,
                                const team_or_block<has_teams> & by, char * memory, ready_type && ready,
                                factor_type && factor) {
    const int  lane     = threadIdx.x % 32;
    const int  n_strips = (of.n_rows + tile_rows - 1) / tile_rows, step = of.n_teams;
    const int  n_mine   = (n_strips - first + step - 1) / step;
    const auto strip_of = [&](int i) {
        const int row = (first + i * step) * tile_rows;
        return strip{ of.weights + row * of.stride, (int) of.stride, min(tile_rows, of.n_rows - row) - 1, width,
                      of.type };
    };
    strips_of_warp<type, decltype(strip_of)> strips(memory + by.warp() * plan.slots_of_a_warp, plan.n_slots, n_mine,
                                                    width, by.warp(), by.n_warps(), strip_of);
    ask_for_end(of, min(first * tile_rows, of.n_rows - 1));
    const auto x        = ready();
    float *    of_warps = (float *) (memory + by.n_warps() * plan.slots_of_a_warp);
    if constexpr (has_teams && n_columns == 1) {
        // the same for all warps of a team, which meet
        const bool is_even = width == by.n_warps() * tiles_of_a_warp * tile_values;
        if (is_even && n_mine <= n_at_once && strips.template are_asked<tiles_of_a_warp>()) {
            return multiply_asked_strips(of, x, strips, first, n_mine, by, of_warps, factor);
        }
    }
    for (int i0 = 0; i0 < n_mine; i0 += n_at_once) {
        const int      row = (first + i0 * step) * tile_rows, n_now = n_at_once == 1 ? 1 : min(n_at_once, n_mine - i0);
        constexpr bool is_asked =
            has_teams && n_at_once == 1; // there is one column, and a thread ends at most one product
        const bool  ends     = is_asked && by.thread() < min(tile_rows, of.n_rows - row);
        const float residual = ends ? residual_of(of, row + by.thread(), 0) : 0.0f;
        for (int i = 0; i < n_now; ++i) {
            sums_of<n_columns, has_teams> sums(x, lane, [&](int c) { return min(c, n - 1); });
            strips.multiply(sums, i0 + i);
            store_sums(of_warps + (i * by.n_warps() + by.warp()) * floats_of_sums<n_columns>, sums);
        }
        by.meet();
        write_strips<n_columns, n_at_once>(
            of, of_warps, row, step * tile_rows, n_now, n, by, [&](float sum, int column, int at) {
                return ended(of, factor(sum, column), at, is_asked ? residual : residual_of(of, at, column));
            });
        by.meet();
    }
}

// Threads of a block, and blocks that the registers of a multiprocessor are for.
template <int n_columns, typename input_type> struct block_limits {
    static constexpr int n_blocks = makes_input<input_type> ? 1 : n_columns == 1 ? 4 : n_columns <= 8 ? 3 : 2;
    // 80 registers spill at 2 and 8 columns. Two rows are faster with more (an H200), eight are not.
    static constexpr bool is_neighbour = n_columns == 1 || n_columns == 8;
    static constexpr int  bounds       = !makes_input<input_type> ? 32 * most_warps
                                         : is_neighbour           ? bounds_of_neighbours
                                                                  : 32 * most_block_warps;
};

template <int n_columns, typename input_type> __global__ void
__launch_bounds__(block_limits<n_columns, input_type>::bounds, block_limits<n_columns, input_type>::n_blocks)
    products(const __grid_constant__ parts all, input_type input, int width, int n, block_plan plan) {
    extern __shared__ __align__(128) char memory[];
    constexpr bool                        has_teams = makes_input<input_type>;
    constexpr bool                        is_late   = is_late_input<input_type>;
    ggml_cuda_pdl_lc();
    if constexpr (takes_byte_tiles<input_type>) {
        load_grids(memory, plan.tiles.grids_at, all.n, [&](int i) { return all.each[i].type; });
    }
    const team by    = has_teams ? team::of_warps(plan.n_warps) : team::of_block();
    const auto ready = [&] {
        ggml_cuda_pdl_sync();
        if constexpr (!has_teams) {
            return static_cast<const activations &>(input);
        } else if constexpr (is_late) {
            const auto made = input.in(memory + plan.activations_at, n);
            input.write(n, made);
            __syncthreads();
            return made.x;
        } else {
            const activations made = activations::in(memory + plan.activations_at, 1, width);
            if (by.number < plan.n_teams) {
                input.write(0, { by, by.number, plan.n_teams }, made);
            }
            __syncthreads();
            return made;
        }
    };
    const auto factor = [&](float sum, int column) {
        if constexpr (is_late_norm<input_type>) { // never joined with what follows: bits do not
                                                  // depend on how many columns there are
            return __fmul_rn(sum, input.factor(input.in(memory + plan.activations_at, n), column));
        } else {
            return sum;
        }
    };
    int index = blockIdx.x;
    if constexpr (has_teams) {
        input.ask(team::of_block());
        if constexpr (n_columns == 1) {
            if (by.number >= plan.n_teams) {
                char * const row = plan.lone_row_at < 0 ? nullptr : memory + plan.lone_row_at;
                return multiply_lone_rows(all, width, row, plan.n_warps, ready, factor);
            }
        }
        index = index * plan.n_teams + by.number;
    }
    int i = 0;
    while (i < all.n && index >= all.each[i].first_team + all.each[i].n_teams) {
        ++i;
    }
    if (has_teams && i == all.n) { // a team without a part
        ready();
        return;
    }
    const part & of = all.each[i];
    with_type<takes_byte_tiles<input_type>>(of.type, [&](auto type_is) {
        constexpr ggml_type type = decltype(type_is)::value;
        if constexpr (!are_floats<type>) {
            multiply_strips<type, n_columns, strips_at_once<input_type>>(
                of, width, index - of.first_team, n, plan.tiles, team_or_block<has_teams>{ by },
                memory + by.number * plan.bytes_of_team, ready, factor);
        } else if constexpr (!is_late) {
            multiply_rows<type, n_columns>(of, ready(), index - of.first_team, n, by);
        }
    });
}

inline bool is_vector(const ggml_tensor * t, int64_t n) {
    return dw::is_f32(t) && ggml_is_contiguous(t) && ggml_nelements(t) == n;
}

inline bool is_weights(const ggml_tensor * t, int64_t width) {
    return is_product_type(t->type) && t->ne[0] == width && t->ne[2] == 1 && t->ne[3] == 1 &&
           is_product_width(t->type, width) && (uintptr_t) t->data % 16 == 0 &&
           (is_float(t->type) || ptx::has_products());
}

inline bool are_readable(const ggml_tensor * t) { // rows, 16 bytes at a time
    return dw::is_f32(t) && t->ne[0] % 32 == 0 && t->ne[2] == 1 && t->ne[3] == 1 && t->nb[1] % 16 == 0;
}

inline bool is_rows(const ggml_tensor * t, int64_t n) {
    return are_readable(t) && t->ne[1] == n && n >= 1 && n <= max_rows;
}

} // namespace dw::layer_parts
