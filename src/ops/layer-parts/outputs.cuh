// Outputs of feed-forward networks of experts: down's product for all pairs, and their weighted sum. A block computes
// 16 outputs of all rows, a warp some of the experts. Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/networks.cuh"

#include <algorithm>
#include <climits>

namespace dw::layer_parts {

static_assert(outputs_of_a_block == tile_rows, "a strip of down");
constexpr int most_down_warps = 16;

template <int n_columns> constexpr int down_threads = n_columns == 1 ? bounds_of_neighbours : 32 * most_down_warps;

// Where the kernel finds what it sums up: outputs of pairs, [pairs][outputs_of_a_block].
__device__ __forceinline__ float & output_of(float * found, int pair, int output) {
    return found[pair * outputs_of_a_block + output];
}

// What routes say, in shared memory: a warp looks up each of its groups, and pairs are weighed in the end.
struct routes_in_block {
    int *     places; // [most groups]
    int *     n_pairs;
    pair_id * pairs;   // [most groups][max_rows]
    float *   weights; // [pairs]

    static size_t bytes(int most, int n_pairs) {
        return (size_t) most * (2 * sizeof(int) + max_rows * sizeof(pair_id)) + n_pairs * sizeof(float);
    }

    __device__ __forceinline__ routes_in_block(char * at, int most) :
        places((int *) at),
        n_pairs(places + most),
        pairs((pair_id *) (n_pairs + most)),
        weights((float *) (pairs + most * max_rows)) {}

    // All threads of a block.
    __device__ __forceinline__ void load(const routes & from, int side, int n_all_pairs) const {
        for (int i = threadIdx.x; i < n_all_pairs; i += blockDim.x) {
            weights[i] = from.weights[i];
        }
        for (int i = threadIdx.x; i < from.n_groups; i += blockDim.x) {
            places[i]  = from.places[side][i];
            n_pairs[i] = from.n_pairs[i];
        }
        constexpr int of_group = max_rows * sizeof(pair_id) / sizeof(int4);
        for (int i = threadIdx.x; i < from.n_groups * of_group; i += blockDim.x) {
            ((int4 *) pairs)[i] = ((const int4 *) from.pairs)[i];
        }
        __syncthreads();
    }
};

// The groups of a warp: the first has the shared expert, the others share the routed ones.
struct groups_of_warp {
    int first, step, n;

    __device__ __forceinline__ groups_of_warp(int warp, int n_warps, int n_groups) :
        first(warp - 1),
        step(warp == 0 ? 1 : n_warps - 1),
        n(warp == 0 ? 1 : (n_groups - first + step - 1) / step) {}
    __device__ __forceinline__ int of(int i) const { return first + i * step; }
};

// Outputs [first, first + outputs_of_a_block) of a group, of float weights.
template <ggml_type type, int n_columns>
__device__ __forceinline__ void project_down_floats(const group & g, int first, int lane, float * found) {
    constexpr int at_once = 2;
    for (int p0 = 0; p0 < g.n_pairs; p0 += n_columns) {
        const float * columns[n_columns];
#pragma unroll
        for (int c = 0; c < n_columns; ++c) {
            columns[c] = g.all.hidden.row(g.pair(min(p0 + c, g.n_pairs - 1)));
        }
#pragma unroll 1
        for (int m0 = 0; m0 < outputs_of_a_block; m0 += at_once) {
            const char * rows[at_once];
            float        sums[at_once][n_columns] = {};
#pragma unroll
            for (int m = 0; m < at_once; ++m) {
                rows[m] = g.of.down.row(g.expert, first + m0 + m);
            }
            add_dots<type>(sums, rows, columns, g.of.down.width, lane);
            add_lanes(sums);
#pragma unroll
            for (int m = 0; m < at_once; ++m) {
#pragma unroll
                for (int c = 0; c < n_columns; ++c) {
                    if (lane == m * n_columns + c && p0 + c < g.n_pairs) {
                        output_of(found, g.pair(p0 + c), m0 + m) = sums[m][c];
                    }
                }
            }
        }
    }
}

// Hidden values of several rows in a block's shared memory (at >= 0): the block copies all of them at once. Without
// room each warp reads those of its pairs from L2.
struct hidden_in_block {
    int at; // bytes

    static size_t bytes(const activations & of, int n_pairs) {
        return activations::quantised::bytes(n_pairs, of.width);
    }

    // where warps read them
    __device__ __forceinline__ activations::quantised place(const activations::quantised & from, int n_pairs,
                                                            char * memory) const {
        return at < 0 ? from : activations::quantised::in(memory + at, n_pairs, from.width);
    }

    // All threads of a block, when the hidden values are there.
    __device__ __forceinline__ void load(const activations & from, int n_pairs, char * memory) const {
        if (at < 0) {
            return;
        }
        copy_by_block(memory + at, from.scales, activations::quantised::bytes(n_pairs, from.width));
        __syncthreads();
    }
};

// Outputs [first, first + outputs_of_a_block) of this warp's groups, of quantised weights. group_of(i) is its group i;
// hidden: by pair, there when ready() has waited for them.
template <ggml_type type, int n_columns, typename group_type, typename ready_type>
__device__ __forceinline__ void project_down_tiles(int n_groups, int width, int first, char * slots, int n_slots,
                                                   float * found, group_type && group_of,
                                                   const activations::quantised & hidden, ready_type && ready) {
    const int  lane     = threadIdx.x % 32;
    const auto strip_of = [&](int i) {
        const group g = group_of(i);
        return strip{ g.of.down.row(g.expert, first), (int) g.of.down.row_stride, tile_rows - 1, width,
                      g.of.down.type };
    };
    strips_of_warp<type, decltype(strip_of)> strips(slots, n_slots, n_groups, width, 0, 1, strip_of);
    constexpr int                            n_tiles = 2; // of a group, where it has 512 hidden values
    if constexpr (n_columns == 1) {
        if (n_groups == 1 && strips.template are_asked<n_tiles>()) {
            const int               pair = group_of(0).pair(0);
            const sums_of<1, false> none(hidden, lane, [&](int) { return pair; });
            strips.template multiply_asked<n_tiles, /*rehearses*/ true>(none, ready, [&](int, const auto & sums) {
                sums.each([&](int, int row, float sum) { output_of(found, pair, row) = sum; });
            });
            return;
        }
    }
    ready();
    for (int i = 0; i < n_groups; ++i) {
        const group g = group_of(i);
        with_columns_of_tile<n_columns>(g.n_pairs, [&](auto columns) {
            sums_of<decltype(columns)::value> sums(hidden, lane, [&](int c) { return g.pair(min(c, g.n_pairs - 1)); });
            strips.multiply(sums, i);
            sums.each([&](int column, int row, float sum) {
                if (column < g.n_pairs) {
                    output_of(found, g.pair(column), row) = sum;
                }
            });
        });
    }
}

// What networks add to: rows of x and of the result.
struct sum_of_networks {
    const float * x;
    int64_t       x_stride;
    float *       dst;
    int64_t       dst_stride;

    // All threads of a block: x of outputs [first, first + outputs_of_a_block), to f32[rows][outputs_of_a_block].
    __device__ __forceinline__ void load(int first, int n_rows, float * residual) const {
        for (int i = threadIdx.x; i < n_rows * outputs_of_a_block; i += blockDim.x) {
            residual[i] = x[i / outputs_of_a_block * x_stride + first + i % outputs_of_a_block];
        }
    }

    // The same outputs: residual + the sum of each row's ranks, by weights f32[rows][n_ranks].
    __device__ __forceinline__ void write(int first, int n_rows, int n_ranks, const float * residual,
                                          const float * weights, float * found) const {
        for (int i = threadIdx.x; i < n_rows * outputs_of_a_block; i += blockDim.x) {
            const int row = i / outputs_of_a_block, output = i % outputs_of_a_block;
            float     sum = 0.0f;
            for (int rank = 0; rank < n_ranks; ++rank) {
                sum = fmaf(weights[row * n_ranks + rank], output_of(found, row * n_ranks + rank, output), sum);
            }
            dst[row * dst_stride + first + output] = residual[i] + sum;
        }
    }
};

// A group by its number: -1 is the shared network's. One row's are its ranks, whose experts are known.
template <bool is_single> __device__ __forceinline__ group group_by_number(const arguments & a, int index,
                                                                           const choice_of_row &   own,
                                                                           const routes_in_block & shared) {
    if (index < 0) {
        return group::of_all_rows(a);
    }
    if (is_single) {
        return group::of_rank(a, index, own.experts[index]);
    }
    return { a.routed, a, index, shared.places[index], shared.n_pairs[index], shared.pairs + index * max_rows };
}

// dst = x + the weighted sum of down hidden. Blocks: outputs_of_a_block outputs. Gate and up (make_hidden_all,
// make_hidden_strips) let this kernel start when the choice, or what it is made from, and x are there: they are read,
// and weights of experts asked for, before these end. Experts may be on their way: of each, gate and up saw a part, so
// all blocks that copy it run, and this kernel may let the next one start at once.
template <int n_columns, bool has_byte_tiles> __global__ void __launch_bounds__(down_threads<n_columns>, 1)
    project_down_all(const __grid_constant__ arguments a, tile_plan plan, int most_groups, hidden_in_block in_block,
                     sum_of_networks to) {
    constexpr bool    is_single = n_columns == 1;
    extern __shared__ __align__(128) char memory[];
    __shared__ choice_of_row              own;
    ggml_cuda_pdl_lc();
    if constexpr (has_byte_tiles) {
        load_grids(memory, plan.grids_at, 2, [&](int i) { return (i == 0 ? a.routed : a.shared).down.type; });
    }
    const int             warp = threadIdx.x / 32, n_warps = blockDim.x / 32, lane = threadIdx.x % 32;
    const int             first = blockIdx.x * outputs_of_a_block, n_ranks = a.n_used + 1;
    float *               found    = (float *) (memory + n_warps * plan.slots_of_a_warp);
    float *               residual = found + n_ranks * a.n * outputs_of_a_block; // [rows][outputs_of_a_block]
    const routes_in_block shared((char *) (residual + a.n * outputs_of_a_block), most_groups);
    to.load(first, a.n, residual);
    if (!is_single) {
        shared.load(*a.chosen, 1, a.n * n_ranks);
    } else {
        if (warp == 0) {
            choose_alone<1>(a, a.n_used, own);
        }
        __syncthreads();
    }
    const groups_of_warp mine(warp, n_warps, is_single ? a.n_used : a.chosen->n_groups);
    if (is_single && warp > 0) {
        for (int i = lane; i < mine.n; i += 32) {
            await_rank<1>(a, mine.of(i), own);
        }
        __syncwarp();
    }
    const auto group_of = [&](int i) { return group_by_number<is_single>(a, mine.of(i), own, shared); };
    // One row is never copied: a constant here, so that its kernel has no code for it.
    const hidden_in_block        copy   = is_single ? hidden_in_block{ -1 } : in_block;
    const activations::quantised hidden = copy.place(a.hidden, a.n * n_ranks, memory);
    const auto                   ready  = [&] {
        ggml_cuda_pdl_sync();
        copy.load(a.hidden, a.n * n_ranks, memory);
    };
    const network & of = warp == 0 ? a.shared : a.routed;
    with_type<has_byte_tiles>(of.down.type, [&](auto type_is) {
        constexpr ggml_type type = decltype(type_is)::value;
        if constexpr (are_floats<type>) {
            ready();
            for (int i = 0; i < mine.n; ++i) {
                const group g = group_of(i);
                with_columns<is_single>(min(g.n_pairs, most_columns), [&](auto columns) {
                    project_down_floats<type, decltype(columns)::value>(g, first, lane, found);
                });
            }
        } else {
            project_down_tiles<type, n_columns>(mine.n, of.down.width, first, memory + warp * plan.slots_of_a_warp,
                                                plan.n_slots, found, group_of, hidden, ready);
        }
    });
    __syncthreads();
    to.write(first, a.n, n_ranks, residual, is_single ? own.weights : shared.weights, found);
}

template <int n_columns> static void launch_lower_of(const arguments & a, const dim3 & blocks, int n_groups,
                                                     const sum_of_networks & to, cudaStream_t stream) {
    const int    most     = a.n == 1 ? 0 : GGML_PAD(n_groups, 4);
    const size_t of_found = sizeof(float) * a.n * (a.n_used + 2) * outputs_of_a_block;
    const int    n_pairs  = a.n == 1 ? 0 : a.n * (a.n_used + 1);
    const size_t others   = of_found + routes_in_block::bytes(most, n_pairs);
    const auto   of_warps = [&](int n_warps) {
        const ggml_type types[]  = { a.routed.down.type, a.shared.down.type };
        const bool      has_many = n_groups + 1 > n_warps; // a warp has several groups
        return tile_launch(types, 2, has_many ? INT_MAX : std::max(a.routed.width, a.shared.width), n_warps, others);
    };
    int n_warps = std::min(most_down_warps, n_groups + 1);
    while (n_warps > 2 && of_warps(n_warps).bytes > shared_memory_of_block()) {
        --n_warps; // a warp has all of a group, so bits stay
    }
    tile_launch     with = of_warps(n_warps);
    hidden_in_block in_block{ -1 };
    const bool      has_quants = !is_float(a.routed.down.type) || !is_float(a.shared.down.type);
    if (a.n > 2 && has_quants) { // of two rows a copy costs what it saves
        const size_t at = GGML_PAD(with.bytes, 16), of_hidden = hidden_in_block::bytes(a.hidden, n_pairs);
        if (at + of_hidden <= shared_memory_of_block()) {
            in_block.at = (int) at;
            with.bytes  = at + of_hidden;
        }
    }
    const ggml_cuda_kernel_launch_params grid{ blocks, dim3(32 * n_warps), with.bytes, stream };
    if (is_byte_tiled(a.routed.down.type) || is_byte_tiled(a.shared.down.type)) {
        dw::launch_kernel<project_down_all<n_columns, true>, n_columns == 1>(grid, a, with.plan, most, in_block, to);
    } else {
        dw::launch_kernel<project_down_all<n_columns, false>, n_columns == 1>(grid, a, with.plan, most, in_block, to);
    }
}

} // namespace dw::layer_parts
