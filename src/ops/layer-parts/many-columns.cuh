// Tiles times 8 or 16 columns, the way that tiles.cuh calls "many": what a lane holds, and how sums are added.
// Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/unpack.cuh"

namespace dw::layer_parts {

// Sums of a warp with 8 n_wide columns.
template <int n_wide> class many_sums {
  public:
    static constexpr int  n_columns = 8 * n_wide;
    static constexpr bool is_ahead  = false;

    // column_of(c): the row of x that is column c
    template <typename rows_type, typename column_type>
    __device__ __forceinline__ many_sums(const rows_type & x, int lane, column_type && column_of) :
        lane_(lane) {
#pragma unroll
        for (int w = 0; w < n_wide; ++w) {
            quants_[w] = x.quants_of(column_of(8 * w + lane / 4));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                scales_[w][i] = x.scales_of(column_of(8 * w + lane % 4 * 2 + i));
            }
        }
    }

    // Nothing: columns are read with each block.
    struct held {};

    template <typename tile_type> __device__ __forceinline__ held hold_tile(int, int) const { return {}; }
    template <ggml_type type> __device__ __forceinline__ held     hold(int, int) const { return {}; }

    // a, b: rows lane / 4 and lane / 4 + 8 of a tile. Columns from their value `first` on, n_blocks blocks of 32.
    template <ggml_type type>
    __device__ __forceinline__ void add(const char * a, const char * b, held x, int first, int n_blocks) {
        if (!unpacked<type>::is_cut || n_blocks == blocks_of_tile) {
            add_tile(whole_tile<type>(a, b, lane_), x, first, n_blocks);
        } else {
            add_tile(unpacked<type>(a, b, lane_), x, first, n_blocks);
        }
    }

    template <typename tile_type>
    __device__ __forceinline__ void add_tile(const tile_type & tile, held, int first, int n_blocks) {
        scales_of_two x;
#pragma unroll
        for (int block = 0; block < blocks_of_tile; ++block) {
            if (tile_type::is_cut && block >= n_blocks) {
                break;
            }
            const auto   words = tile.words(block);
            const float2 scale = tile.scale(block);
            const int    c     = tile_type::class_of(block);
            float2       least = {};
            if constexpr (tile_type::has_least) {
                least = tile.least(block);
            }
            load_scales<tile_type>(x, block, first);
#pragma unroll
            for (int w = 0; w < n_wide; ++w) {
                int d[4];
                multiply(d, tile, words, tile_type::values(quants_[w] + first + 32 * block, lane_), block);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float4        two = x[w][i % 2];
                    const scale_and_sum x   = block % 2 ? make_float2(two.z, two.w) : make_float2(two.x, two.y);
                    sums_[w][i][c]          = fmaf((i / 2 ? scale.y : scale.x) * x.x, (float) d[i], sums_[w][i][c]);
                    if constexpr (tile_type::has_least) {
                        sums_[w][i][c] = fmaf(i / 2 ? -least.y : -least.x, x.y, sums_[w][i][c]);
                    }
                }
            }
        }
    }

    // call(column, row, sum) for what this lane has
    template <typename call_type> __device__ __forceinline__ void each(call_type && call) const {
#pragma unroll
        for (int w = 0; w < n_wide; ++w) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float (&of)[n_classes] = sums_[w][i];
                call(8 * w + lane_ % 4 * 2 + i % 2, lane_ / 4 + i / 2 * 8, (of[0] + of[1]) + (of[2] + of[3]));
            }
        }
    }

  private:
    // Of the blocks 2 i and 2 i + 1 of columns.
    using scales_of_two = float4[n_wide][2];

    // d: dots of a block, in whole numbers
    template <typename tile_type> static __device__ __forceinline__ void
    multiply(int (&d)[4], const tile_type & tile, const words_of_a & words, uint2 values, int block) {
        if constexpr (tile_type::has_halves) {
            const int4 by       = tile.halves(block);
            int        first[4] = {}, second[4] = {};
            ptx::multiply_8_bits(first, make_uint2(words.at[0], words.at[1]), values.x);
            ptx::multiply_8_bits(second, make_uint2(words.at[2], words.at[3]), values.y);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                d[i] = first[i] * (i / 2 ? by.z : by.x) + second[i] * (i / 2 ? by.w : by.y);
            }
        } else {
            d[0] = d[1] = d[2] = d[3] = 0;
            ptx::multiply_8_bits<tile_type::is_signed>(d, words.at, values);
        }
    }

    // Loads them when `block` is 2 i.
    template <typename tile_type>
    __device__ __forceinline__ void load_scales(scales_of_two & x, int block, int first) const {
#pragma unroll
        for (int w = 0; w < n_wide; ++w) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const scale_and_sum * at = scales_[w][i] + first / 32 + block;
                if constexpr (tile_type::is_cut) { // there may be no second one
                    x[w][i] = make_float4(at->x, at->y, at->x, at->y);
                } else if (block % 2 == 0) {
                    x[w][i] = *(const float4 *) at;
                }
            }
        }
    }

    int                   lane_;
    const int8_t *        quants_[n_wide];    // of column lane / 4
    const scale_and_sum * scales_[n_wide][2]; // of columns 2 (lane % 4) and the next
    float                 sums_[n_wide][4][n_classes] = {};
};

} // namespace dw::layer_parts
