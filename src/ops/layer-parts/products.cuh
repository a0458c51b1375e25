// Products of rows of activations with several weights in one launch. A team of warps multiplies 16 rows of quantised
// weights, each warp a part of them, or of float weights a row a warp. Weights are asked for before the kernel waits
// for the one before it. One row of activations, or several late ones, are made by each block for itself, others by a
// kernel before. How work is divided: product-list.cuh. Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/door/launch.h"
#include "ops/layer-parts/gated.cuh"
#include "ops/layer-parts/late-inputs.cuh"
#include "ops/layer-parts/pieces.cuh"

namespace dw::layer_parts {

constexpr int most_warps       = 8; // of a team
constexpr int tiles_of_a_warp  = 2; // of a strip, at widths of up to most_warps times as much
constexpr int most_block_warps = 16;
constexpr int max_parts        = 4;

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
// then the activations that the block makes, if it does; then a row of float weights of the warp without a team, if
// there is one.
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

// Row `row` of a part with float weights, which lies at `at`, times columns [first, last). A warp.
template <ggml_type type, int n_columns> __device__ void multiply_row(const part & of, const activations & x, int row,
                                                                      const char * at, int first, int last, int lane) {
    const char * const rows[1] = { at };
    for (int c0 = first; c0 < last; c0 += n_columns) {
        const float * columns[n_columns];
        float         sums[1][n_columns] = {};
#pragma unroll
        for (int c = 0; c < n_columns; ++c) {
            columns[c] = x.row(min(c0 + c, last - 1));
        }
        add_dots<type>(sums, rows, columns, x.width, lane);
        add_lanes(sums);
#pragma unroll
        for (int c = 0; c < n_columns; ++c) {
            if (lane == c && c0 + c < last) {
                of.out[(c0 + c) * of.out_stride + row] = ended(of, sums[0][c], row, residual_of(of, row, c0 + c));
            }
        }
    }
}

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
template <typename input_type> constexpr bool is_late_input =
    std::is_same_v<input_type, late_normalised> || std::is_same_v<input_type, late_gated>;

// Strips that a team multiplies between two meetings of its warps. All that have slots, where sums may take more
// memory.
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
        return strip{ of.weights + row * of.stride, (int) of.stride, min(tile_rows, of.n_rows - row) - 1, width };
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
            const int number                = by.thread() / tile_rows,
                      row                   = (first + number * step) * tile_rows + by.thread() % tile_rows;
            const bool             ends     = number < n_mine && row < of.n_rows;
            const float            residual = ends ? residual_of(of, row, 0) : 0.0f;
            const sums_of<1, true> none(x, lane, [](int) { return 0; });
            strips.template multiply_asked<tiles_of_a_warp>(none, [&](int i, const auto & sums) {
                store_sums(of_warps + (i * by.n_warps() + by.warp()) * floats_of_sums<1>, sums);
            });
            by.meet();
            if (ends) {
                const float sum = sum_of_team<1>(of_warps, number, 0, by.thread() % tile_rows, by.n_warps());
                of.out[row]     = ended(of, factor(sum, 0), row, residual);
            }
            return;
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

// A team's share of a part with float weights, a row a warp.
template <ggml_type type, int n_columns>
__device__ void multiply_rows(const part & of, const activations & x, int index, int n, const team & by) {
    const int task = by.n_warps * index + by.warp, row = task / of.n_shares;
    const int columns = (n + of.n_shares - 1) / of.n_shares, first = task % of.n_shares * columns;
    if (row < of.n_rows) {
        const auto multiply = [&](auto at_once) {
            multiply_row<type, decltype(at_once)::value>(of, x, row, of.weights + row * of.stride, first,
                                                         min(first + columns, n), threadIdx.x % 32);
        };
        if constexpr (n_columns == 1) {
            multiply(std::integral_constant<int, 1>{});
        } else if (of.n_shares > 1) {
            multiply(std::integral_constant<int, 2>{});
        } else {
            multiply(std::integral_constant<int, 4>{});
        }
    }
}

// Row of Q8_0 weights that lies at `at`, times one column: the bits of a strip that a team of n_warps multiplies. A
// lane has what one of its warps has of a class of blocks (tiles.cuh). A warp.
template <typename rows_type>
__device__ __forceinline__ float dot_of_row(const rows_type & x, int width, const char * at, int n_warps, int lane) {
    const int8_t *        quants = x.quants_of(0);
    const scale_and_sum * scales = x.scales_of(0);
    float                 sum    = 0.0f;
    for (int tile = lane / n_classes; lane / n_classes < n_warps && tile * tile_values < width; tile += n_warps) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int block = blocks_of_tile * tile + lane % n_classes * 2 + i;
            if (32 * block < width) {
                const uint16_t * of  = (const uint16_t *) (at + block * sizeof(block_q8_0));
                const int *      by  = (const int *) (quants + 32 * block);
                int              dot = 0;
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    dot = ggml_cuda_dp4a(of[2 * j + 1] | of[2 * j + 2] << 16, by[j], dot);
                }
                sum = fmaf(__half2float(__ushort_as_half(of[0])) * scales[block].x, (float) dot, sum);
            }
        }
    }
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    float all = 0.0f;
    for (int w = 0; w < n_warps; ++w) {
        all += __shfl_sync(0xffffffff, sum, n_classes * w);
    }
    return all;
}

// One column times rows that no team has: of all these this block's is the one with its number, then every so many.
// memory: for the first row, or nullptr; n_warps: of a team; factor: as below. A warp.
template <typename ready_type, typename factor_type>
__device__ void multiply_lone_rows(const parts & all, int width, char * memory, int n_warps, ready_type && ready,
                                   factor_type && factor) {
    const int  lane    = threadIdx.x % 32;
    const auto part_of = [&](int row) {
        int i = 0;
        while (all.each[i].first_lone_row < 0 || row >= all.each[i].first_lone_row + all.each[i].n_rows) {
            ++i;
        }
        return i;
    };
    int first = blockIdx.x;
    if (memory && first < all.n_lone_rows) {
        const part & of      = all.each[part_of(first)];
        const char * row     = of.weights + (first - of.first_lone_row) * of.stride;
        const int    n_bytes = of.type == GGML_TYPE_Q8_0 ? width / QK8_0 * (int) sizeof(block_q8_0)
                                                         : width * (of.type == GGML_TYPE_F32 ? 4 : 2);
        for (int at = 16 * lane; at < n_bytes; at += 16 * 32) {
            ptx::copy_16(memory + at, row + at);
        }
        ask_for_end(of, first - of.first_lone_row);
    }
    ptx::end_of_copies();
    const auto x = ready();
    wait_for_requests<0>();
    for (int i = first; i < all.n_lone_rows; i += gridDim.x) {
        const part & of  = all.each[part_of(i)];
        const int    row = i - of.first_lone_row;
        const char * at  = memory && i == first ? memory : of.weights + row * of.stride;
        if (of.type == GGML_TYPE_Q8_0) {
            const float sum = factor(dot_of_row(x, width, at, n_warps, lane), 0);
            if (lane == 0) {
                of.out[row] = ended(of, sum, row, residual_of(of, row, 0));
            }
        } else if constexpr (std::is_same_v<std::decay_t<decltype(x)>, activations>) {
            with_type(of.type, [&](auto type_is) {
                constexpr ggml_type type = decltype(type_is)::value;
                if constexpr (are_floats<type>) {
                    multiply_row<type, 1>(of, x, row, at, 0, 1, lane);
                }
            });
        }
    }
}

// Threads of a block, and blocks that the registers of a multiprocessor are for.
template <int n_columns, typename input_type> struct block_limits {
    static constexpr bool makes_input = !std::is_same_v<input_type, activations>;
    static constexpr int  n_blocks    = makes_input ? 1 : n_columns == 1 ? 4 : n_columns <= 8 ? 3 : 2;
    static constexpr int  bounds      = !makes_input     ? 32 * most_warps
                                        : n_columns <= 8 ? bounds_of_neighbours
                                                         : 32 * most_block_warps;
};

template <int n_columns, typename input_type> __global__ void
__launch_bounds__(block_limits<n_columns, input_type>::bounds, block_limits<n_columns, input_type>::n_blocks)
    products(const __grid_constant__ parts all, input_type input, int width, int n, block_plan plan) {
    extern __shared__ __align__(16) char memory[];
    constexpr bool                       has_teams = block_limits<n_columns, input_type>::makes_input;
    constexpr bool                       is_late   = is_late_input<input_type>;
    ggml_cuda_pdl_lc();
    const team by    = has_teams ? team::of_warps(plan.n_warps) : team::of_block();
    const auto ready = [&] {
        ggml_cuda_pdl_sync();
        if constexpr (!has_teams) {
            return input;
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
        if constexpr (std::is_same_v<input_type, late_normalised>) { // never joined with what follows: bits do not
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
    with_type(of.type, [&](auto type_is) {
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
           width % ggml_blck_size(t->type) == 0 && (uintptr_t) t->data % 16 == 0 &&
           (is_float(t->type) || ptx::has_products());
}

inline bool is_rows(const ggml_tensor * t, int64_t n) {
    return dw::is_f32(t) && t->ne[0] % 32 == 0 && t->ne[1] == n && t->ne[2] == 1 && t->ne[3] == 1 && n >= 1 &&
           n <= max_rows && t->nb[1] % 16 == 0;
}

} // namespace dw::layer_parts
