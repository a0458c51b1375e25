// Products of rows that a warp each multiplies: float weights, and for one row of activations a few of Q8_0, which
// would keep a team longer than its strips. Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/product-parts.cuh"

namespace dw::layer_parts {

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
// memory: for the first row, or nullptr; n_warps: of a team; factor(sum, column): as of multiply_strips. A warp.
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
        const int    n_bytes = of.type == GGML_TYPE_Q8_0 ? tiled<GGML_TYPE_Q8_0>::bytes(width)
                                                         : width * (of.type == GGML_TYPE_F32 ? 4 : 2);
        for (int at = 16 * lane; at < n_bytes; at += 16 * 32) {
            ptx::copy_16</*once*/ true>(ptx::address_of(memory + at), row + at);
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
            with_type</*has_byte_tiles*/ false>(of.type, [&](auto type_is) {
                constexpr ggml_type type = decltype(type_is)::value;
                if constexpr (are_floats<type>) {
                    multiply_row<type, 1>(of, x, row, at, 0, 1, lane);
                }
            });
        }
    }
}

} // namespace dw::layer_parts
