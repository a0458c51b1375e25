// Hidden values of feed-forward networks, of experts that rows chose or of one that all rows take. A block computes 32
// hidden values: of quantised weights four strips of 16 rows, gate's and up's, in two halves each.
// Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/door/chain.cuh"
#include "ops/door/launch.h"
#include "ops/layer-parts/network-arguments.cuh"
#include "ops/layer-parts/slots.cuh"

#include <climits>
#include <type_traits>

namespace dw::layer_parts {

static_assert(hidden_of_a_block == 32, "a block of 8 bits");
constexpr int halves_of_a_strip = 2; // every second piece each
constexpr int n_halves          = 4 * halves_of_a_strip;

// warps of a team: of one row a half of a strip each; of several rows two, so that more blocks are on their way
template <int n_columns> constexpr int hidden_warps = n_columns == 1 ? n_halves : n_halves / 2;
// Of one row a block may have a second team, for a piece of the shared network: it need not wait for a choice, so two
// strips a warp are early enough, and leave the next kernel registers.
constexpr int shared_warps = n_halves / 2;
static_assert(hidden_warps<16> % halves_of_a_strip == 0 && shared_warps % halves_of_a_strip == 0,
              "a warp has the same half of each of its strips");

constexpr int most_columns = 4; // pairs that read float weights together
static_assert(std::min(hidden_warps<16>, shared_warps) >= most_columns, "a warp stores a pair's hidden values");

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

// Hidden value `value` of pairs [p0, p0 + n_columns) into `out` [pairs][hidden_of_a_block], of float weights.
template <ggml_type type, int n_columns>
__device__ __forceinline__ void hide(const group & g, int p0, int value, int lane, float * out) {
    const char *  rows[2] = { g.of.gate.row(g.expert, value), g.of.up.row(g.expert, g.of.first_up + value) };
    const float * columns[n_columns];
    float         sums[2][n_columns] = {};
#pragma unroll
    for (int c = 0; c < n_columns; ++c) {
        columns[c] = g.all.h.row(g.row(min(p0 + c, g.n_pairs - 1)));
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

// Hidden values from `begin` on of all pairs of a group.
template <ggml_type type, bool is_single>
__device__ __forceinline__ void make_hidden_floats(const group & g, int begin, const team & by, char * memory) {
    const int warp = by.warp, n_warps = by.n_warps, lane = threadIdx.x % 32;
    float *   found = (float *) memory; // [pairs][hidden_of_a_block]
    for (int p0 = 0; p0 < g.n_pairs; p0 += most_columns) {
        const int n_columns = min(most_columns, g.n_pairs - p0);
        with_columns<is_single>(n_columns, [&](auto columns) {
#pragma unroll 1
            for (int i = warp; i < hidden_of_a_block; i += n_warps) {
                hide<type, decltype(columns)::value>(g, p0, begin + i, lane, found);
            }
        });
        by.meet();
        if (warp < n_columns) {
            const bool is_there = lane < hidden_of_a_block / 4;
            const auto v =
                is_there ? ((const float4 *) (found + warp * hidden_of_a_block))[lane] : make_float4(0, 0, 0, 0);
            g.all.hidden.store(g.pair(p0 + warp), begin / 4 + lane, v, is_there);
        }
        by.meet();
    }
}

// A hidden value of a column, from the sums of the halves of gate's and up's strips.
template <int n_columns> __device__ __forceinline__ float hidden_value(const float * of_halves, int column, int value) {
    float of[2] = {};
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        const int strip = 2 * side + value / tile_rows;
#pragma unroll
        for (int half = 0; half < halves_of_a_strip; ++half) {
            of[side] += of_halves[(strip * halves_of_a_strip + half) * floats_of_sums<n_columns> +
                                  place_of_sum(column, value % tile_rows)];
        }
    }
    return silu(of[0]) * of[1];
}

// Writes hidden values from `begin` on of a column, a pair's, from the sums of all halves. A warp.
template <int n_columns> __device__ __forceinline__ void store_hidden(const arguments & a, const float * of_halves,
                                                                      int column, int pair, int begin) {
    const int   lane  = threadIdx.x % 32;
    const float value = hidden_value<n_columns>(of_halves, column, lane);
    float4      v;
    v.x = __shfl_sync(0xffffffff, value, 4 * lane % 32);
    v.y = __shfl_sync(0xffffffff, value, (4 * lane + 1) % 32);
    v.z = __shfl_sync(0xffffffff, value, (4 * lane + 2) % 32);
    v.w = __shfl_sync(0xffffffff, value, (4 * lane + 3) % 32);
    a.hidden.store(pair, begin / 4 + lane, v, lane < hidden_of_a_block / 4);
}

// Hidden values from `begin` on of all pairs of a group, n_columns at most. row_of_lane: lane l has the row of pair
// l % max_rows, valid below n_pairs. It is read before weights are asked for: behind them it would come late. before():
// called when weights are on their way.
template <ggml_type type, int n_columns, typename before_type>
__device__ __forceinline__ void make_hidden_tiles(const group & g, int row_of_lane, int begin, const tile_plan & plan,
                                                  const team & by, char * memory, before_type && before) {
    const int  warp = by.warp, n_warps = by.n_warps, lane = threadIdx.x % 32, n_mine = n_halves / n_warps;
    const auto strip_of = [&](int i) {
        const int      number = (warp + i * n_warps) / halves_of_a_strip; // two of gate, two of up
        const matrix & of     = number < 2 ? g.of.gate : g.of.up;
        const int      first  = (number < 2 ? 0 : g.of.first_up) + begin + number % 2 * tile_rows;
        return strip{ of.row(g.expert, first), (int) of.row_stride, tile_rows - 1, of.width, of.type };
    };
    const sums_of<n_columns, n_columns == 1> none(
        g.all.h, lane, [&](int c) { return __shfl_sync(0xffffffff, row_of_lane, min(c, g.n_pairs - 1)); });
    strips_of_warp<type, decltype(strip_of)> strips(memory + warp * plan.slots_of_a_warp, plan.n_slots, n_mine,
                                                    g.of.gate.width, warp % halves_of_a_strip, halves_of_a_strip,
                                                    strip_of);
    before();
    float * of_halves = (float *) (memory + n_warps * plan.slots_of_a_warp);
    for (int i = 0; i < n_mine; ++i) {
        auto sums = none;
        if constexpr (n_columns == 1) {
            strips.multiply_ahead(sums, i);
        } else {
            strips.multiply(sums, i);
        }
        store_sums(of_halves + (warp + i * n_warps) * floats_of_sums<n_columns>, sums);
    }
    by.meet();
    for (int i = warp; i < g.n_pairs; i += n_warps) {
        store_hidden<n_columns>(g.all, of_halves, i, g.pair(i), begin);
    }
}

// Where a block's second team begins in the shared network, whose pieces all blocks share; -1: it has none.
__device__ __forceinline__ int begin_of_second_team(int width) {
    const int block = blockIdx.y * gridDim.x + blockIdx.x, n_blocks = gridDim.x * gridDim.y;
    const int n_pieces = width / hidden_of_a_block, mine = block * n_pieces / n_blocks;
    return (block + 1) * n_pieces / n_blocks == mine ? -1 : mine * hidden_of_a_block;
}

struct hidden_plan {
    tile_plan tiles;
    bool      has_second; // team
    int       second_at;  // bytes: where its shared memory is
};

// hidden = silu(gate h) * up h. Blocks: (32 hidden values, group). Group 0 is the shared network's, unless blocks have
// a second team: those share it. n_columns: of a group, at most. Each block waits for the kernel before this one and
// only then lets the next one start, so that project_down_all reads the choice and x before its own wait. is_pooled: of
// one row whose experts lie in a pool; the kernel that has none must not have this code, which costs it time. If
// experts may be on their way, it lets the next kernel start behind its wait for its own. has_byte_tiles: with_type.
template <int n_columns, bool is_pooled, bool has_byte_tiles> __global__ void
__launch_bounds__(n_columns == 1 ? bounds_of_neighbours : 32 * hidden_warps<n_columns>, n_columns == 1 ? 1 : 4)
    make_hidden_all(const __grid_constant__ arguments a, hidden_plan plan) {
    constexpr bool    is_single = n_columns == 1;
    extern __shared__ __align__(128) char memory[];
    __shared__ choice_of_row              own;
    constexpr int                         first_warps = hidden_warps<n_columns>;
    const int                             warp        = threadIdx.x / 32;
    const team                            by =
        is_single && warp >= first_warps ? team{ 1, warp - first_warps, shared_warps } : team{ 0, warp, first_warps };
    if constexpr (has_byte_tiles) {
        load_grids(memory, plan.tiles.grids_at, 2, [&](int i) { return (i == 0 ? a.routed : a.shared).gate.type; });
    }
    int        index = (int) blockIdx.y - !plan.has_second, begin = blockIdx.x * hidden_of_a_block;
    const bool awaits = is_pooled && a.before.waits[0].state;
    const auto wait   = [&] {
        ggml_cuda_pdl_sync();
        if (!awaits) {
            ggml_cuda_pdl_lc();
        }
    };
    if (is_single && by.number == 1) {
        begin = begin_of_second_team(a.shared.width);
        if (begin < 0) {
            return;
        }
        index = -1;
    }
    int row_of_lane = threadIdx.x % max_rows; // of the shared network's pair
    if (index >= 0) {
        wait();
        if (is_single) {
            choose_for_team<is_pooled>(a, index, by, own);
            if (awaits) {
                ggml_cuda_pdl_lc();
            }
        } else {
            row_of_lane = a.chosen->pairs[index][threadIdx.x % max_rows] / (a.n_used + 1);
            if (index >= a.chosen->n_groups) {
                return;
            }
        }
    }
    const group g = index < 0   ? group::of_all_rows(a)
                    : is_single ? group::of_rank(a, index, own.experts[index])
                                : group::of_chosen(a, index);
    if (begin >= g.of.width) {
        return;
    }
    const auto before = [&] {
        if (index < 0) {
            wait();
        }
    };
    with_type<has_byte_tiles>(g.of.gate.type, [&](auto type_is) {
        constexpr ggml_type type = decltype(type_is)::value;
        char * const        mine = memory + by.number * plan.second_at;
        if constexpr (are_floats<type>) {
            before();
            make_hidden_floats<type, is_single>(g, begin, by, mine);
        } else {
            with_columns_of_tile<n_columns>(g.n_pairs, [&](auto columns) {
                make_hidden_tiles<type, decltype(columns)::value>(g, row_of_lane, begin, plan.tiles, by, mine, before);
            });
        }
    });
}

// Waits for one row's experts, where blocks of gate and up may leave no room for the kernel that copies, and writes
// where they are: places [2][n_used]. A warp.
static __global__ void await_all(const chosen_before of, int n_used, int32_t * places) {
    ggml_cuda_pdl_sync();
    const int rank = threadIdx.x;
    if (rank < n_used) {
        expert_slots::deadline until;
        for (int side = 0; side < 2; ++side) {
            places[side * n_used + rank] = of.when_there(side, of.index(side, 0, rank, n_used), 0, rank, until);
        }
    }
    __syncwarp();
    ggml_cuda_pdl_lc();
}

// n_more: warps of second teams
template <int n_columns> static tile_launch tiles_of_hidden(const arguments & a, int n_more) {
    constexpr int   n_warps = hidden_warps<n_columns>;
    const size_t    of_sums = sizeof(float) * n_halves * floats_of_sums<n_columns>;
    const ggml_type types[] = { a.routed.gate.type, a.shared.gate.type };
    const int n_values      = n_warps < n_halves ? INT_MAX : (int) dw::n_blocks(a.shared.gate.width, halves_of_a_strip);
    return tile_launch(types, 2, n_values, n_warps + n_more, (n_more > 0 ? 2 : 1) * of_sums);
}

// Whether blocks of one row have a second team: then there is at most one of them on a multiprocessor.
static bool has_second_team(const arguments & a, int n_groups) {
    const int64_t n_blocks = dw::n_blocks(a.routed.width, hidden_of_a_block) * n_groups;
    return a.n == 1 && a.shared.width <= n_groups * a.routed.width && n_blocks <= n_multiprocessors() &&
           tiles_of_hidden<1>(a, shared_warps).bytes <= shared_memory_of_block();
}

template <int n_columns> static void launch_hidden_of(const arguments & a, int n_groups, cudaStream_t stream) {
    constexpr int     n_warps    = hidden_warps<n_columns>;
    const size_t      of_sums    = sizeof(float) * n_halves * floats_of_sums<n_columns>;
    const bool        has_second = n_columns == 1 && has_second_team(a, n_groups);
    const int64_t     width      = has_second ? a.routed.width : std::max(a.routed.width, a.shared.width);
    const int         n_more     = has_second ? shared_warps : 0;
    const dim3        blocks(dw::n_blocks(width, hidden_of_a_block), n_groups + !has_second);
    const tile_launch with = tiles_of_hidden<n_columns>(a, n_more);
    const hidden_plan plan{ with.plan, has_second, (int) (n_warps * with.plan.slots_of_a_warp + of_sums) };
    const ggml_cuda_kernel_launch_params grid{ blocks, dim3(32 * (n_warps + n_more)), with.bytes, stream };
    const bool                           is_pooled = n_columns == 1 && a.before.choice;
    const auto                           launch    = [&](auto has_byte_tiles) {
        constexpr bool has = decltype(has_byte_tiles)::value, is_single = n_columns == 1;
        if (is_pooled) {
            return dw::launch_kernel<make_hidden_all<n_columns, is_single, has>, is_single>(grid, a, plan);
        }
        dw::launch_kernel<make_hidden_all<n_columns, false, has>, is_single>(grid, a, plan);
    };
    if (is_byte_tiled(a.routed.gate.type) || is_byte_tiled(a.shared.gate.type)) {
        launch(std::true_type{});
    } else {
        launch(std::false_type{});
    }
}

// n_groups: the shared network's not counted
static inline void launch_hidden(const arguments & a, int n_groups, cudaStream_t stream) {
    if (a.n == 1) {
        return launch_hidden_of<1>(a, n_groups, stream);
    }
    return a.n <= 8 ? launch_hidden_of<8>(a, n_groups, stream) : launch_hidden_of<16>(a, n_groups, stream);
}

} // namespace dw::layer_parts
