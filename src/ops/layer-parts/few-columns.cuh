// Tiles times 1 or 2 columns, the way that tiles.cuh calls "few": what a lane holds, and how sums are added.
// Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/planes.cuh"

namespace dw::layer_parts {

// Sums of a warp with 1 or 2 columns. ahead: columns are asked for before a piece of weights is there, which takes
// registers.
template <int n, bool ahead> class few_sums {
  public:
    static constexpr int  n_columns = n;
    static constexpr bool is_ahead  = ahead;

    template <typename rows_type, typename column_type>
    __device__ __forceinline__ few_sums(const rows_type & x, int lane, column_type && column_of) :
        lane_(lane) {
#pragma unroll
        for (int c = 0; c < n; ++c) {
            quants_[c] = x.quants_of(column_of(c));
            scales_[c] = x.scales_of(column_of(c));
        }
    }

    // What this lane needs of the columns for a tile.
    struct held {
        uint2         values[n];
        scale_and_sum scales[n][2]; // of the two blocks, or of the one of each half, whose dots this lane has
    };

    // Of n_blocks blocks from value `first` on: asked for before the tile is there.
    template <ggml_type type> __device__ __forceinline__ held hold(int first, int n_blocks) const {
        return !unpacked<type>::is_cut || n_blocks == blocks_of_tile ? hold_tile<whole_tile<type>>(first, n_blocks)
                                                                     : hold_tile<unpacked<type>>(first, n_blocks);
    }

    template <typename tile_type> __device__ __forceinline__ held hold_tile(int first, int n_blocks) const {
        held x;
#pragma unroll
        for (int c = 0; c < n; ++c) {
            if constexpr (tile_type::has_halves) {
                const int at  = lane_ / 8 * 32 + lane_ / 4 % 2 * 16 + lane_ % 4 * 4; // of a half of the tile
                x.values[c].x = *(const uint32_t *) (quants_[c] + first + at);
                x.values[c].y = *(const uint32_t *) (quants_[c] + first + 32 * n_classes + at);
                if constexpr (tile_type::is_rotated) {
                    x.values[c] = make_uint2(rotated(x.values[c].x, lane_), rotated(x.values[c].y, lane_));
                }
                x.scales[c][0] = scales_[c][first / 32 + lane_ % 4];
                x.scales[c][1] = scales_[c][first / 32 + n_classes + lane_ % 4];
            } else {
                const int  mine = lane_ / 4, block = lane_ % 4 * 2;
                const auto is_there = [&](int i) { return !tile_type::is_cut || i < n_blocks; };
                x.values[c] =
                    is_there(mine) ? tile_type::values(quants_[c] + first + 32 * mine, lane_) : make_uint2(0, 0);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    x.scales[c][i] = is_there(block + i) ? scales_[c][first / 32 + block + i] : make_float2(0.0f, 0.0f);
                }
            }
        }
        return x;
    }

    template <ggml_type type>
    __device__ __forceinline__ void add(const char * a, const char * b, const held & x, int first, int n_blocks) {
        if (!unpacked<type>::is_cut || n_blocks == blocks_of_tile) {
            add_tile(whole_tile<type>(a, b, lane_), x, first, n_blocks);
        } else {
            add_tile(unpacked<type>(a, b, lane_), x, first, n_blocks);
        }
    }

    template <typename tile_type>
    __device__ __forceinline__ void add_tile(const tile_type & tile, const held & x, int, int n_blocks) {
        if constexpr (tile_type::has_halves) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if constexpr (tile_type::has_planes) {
                    add_planes(tile, half, x);
                } else {
                    add_halves(tile, half, x);
                }
            }
        } else if constexpr (tile_type::has_nibbles) {
            add_nibbles(tile, x);
        } else {
            add_blocks(tile, x, n_blocks);
        }
    }

    template <typename call_type> __device__ __forceinline__ void each(call_type && call) const {
#pragma unroll
        for (int c = 0; c < n; ++c) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float sum = sums_[c][i];
                sum += __shfl_xor_sync(0xffffffff, sum, 1);
                sum += __shfl_xor_sync(0xffffffff, sum, 2);
                if (lane_ % 4 == 2 * c + i) {
                    call(c, lane_ / 4 + 8 * i, sum);
                }
            }
        }
    }

  private:
    // A tile. The columns of the tensor core are its blocks.
    template <typename tile_type>
    __device__ __forceinline__ void add_blocks(const tile_type & tile, const held & x, int n_blocks) {
        const int mine    = lane_ / 4;          // this lane's block as an operand
        int       d[n][4] = {}, odd[n][4] = {}; // two chains of products are done sooner than one
#pragma unroll
        for (int block = 0; block < blocks_of_tile; ++block) {
            if (tile_type::is_cut && block >= n_blocks) {
                break;
            }
            const auto words = tile.words(block);
#pragma unroll
            for (int c = 0; c < n; ++c) {
                ptx::multiply_8_bits<tile_type::is_signed>(block % 2 ? odd[c] : d[c], words.at,
                                                           block == mine ? x.values[c] : make_uint2(0, 0));
            }
        }
#pragma unroll
        for (int c = 0; c < n; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                d[c][i] += odd[c][i];
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int block = lane_ % 4 * 2 + i;
            if (tile_type::is_cut && block >= n_blocks) {
                break;
            }
#pragma unroll
            for (int c = 0; c < n; ++c) {
                finish(tile, c, block, x.scales[c][i], d[c][i], d[c][2 + i]);
            }
        }
    }

    // The same. Dots of whole bytes, less those of their lower halves, are those of the upper ones, 16 times: so two
    // blocks share an operand of columns, and half as many are masked.
    template <typename tile_type> __device__ __forceinline__ void add_nibbles(const tile_type & tile, const held & x) {
        const int mine        = lane_ / 8; // these two blocks
        int       lower[n][4] = {}, whole[n][4] = {};
#pragma unroll
        for (int i = 0; i < blocks_of_tile / 2; ++i) {
            const words_of_a bytes = tile.nibbles(i), nibbles = bytes.masked(0x0f0f0f0f);
#pragma unroll
            for (int c = 0; c < n; ++c) {
                const uint2 values = i == mine ? x.values[c] : make_uint2(0, 0);
                ptx::multiply_8_bits<false>(lower[c], nibbles.at, values);
                ptx::multiply_8_bits<false>(whole[c], bytes.at, values);
            }
        }
        const int block = lane_ % 4 * 2;
#pragma unroll
        for (int c = 0; c < n; ++c) {
            finish(tile, c, block, x.scales[c][0], lower[c][0], lower[c][2]);
            finish(tile, c, block + 1, x.scales[c][1], whole[c][1] - lower[c][1], whole[c][3] - lower[c][3]);
        }
    }

    // A half of a tile, four blocks. The columns of the tensor core are the blocks' halves.
    template <typename tile_type>
    __device__ __forceinline__ void add_halves(const tile_type & tile, int half, const held & x) {
        const int block = half * n_classes, mine = lane_ / 8; // mine: this lane's block as an operand
        int       d[n][4] = {};
#pragma unroll
        for (int i = 0; i < n_classes; ++i) {
            const auto words = tile.words(block + i);
#pragma unroll
            for (int c = 0; c < n; ++c) {
                const uint32_t four = i == mine ? half ? x.values[c].y : x.values[c].x : 0;
                ptx::multiply_8_bits<tile_type::is_signed>(d[c], words.at,
                                                           lane_ / 4 % 2 ? make_uint2(0, four) : make_uint2(four, 0));
            }
        }
        const int4 by = tile.halves(block + lane_ % 4);
#pragma unroll
        for (int c = 0; c < n; ++c) {
            finish(tile, c, block + lane_ % 4, x.scales[c][half], d[c][0] * by.x + d[c][1] * by.y,
                   d[c][2] * by.z + d[c][3] * by.w);
        }
    }

    template <typename tile_type>
    __device__ __forceinline__ void add_planes(const tile_type & tile, int half, const held & x) {
        uint32_t values[n];
#pragma unroll
        for (int c = 0; c < n; ++c) {
            values[c] = half ? x.values[c].y : x.values[c].x;
        }
        const dots_of_planes<n> of(tile, half, values, lane_);
        const int               block = half * n_classes + lane_ % 4;
        const int4              by    = tile.halves(block);
#pragma unroll
        for (int c = 0; c < n; ++c) {
            const int (&d)[4]   = of.d[c];
            scale_and_sum scale = x.scales[c][half];
            scale.x *= 4.0f * of.unit; // finish() knows dots that count 4 times
            finish(tile, c, block, scale, d[0] * by.x + d[1] * by.y, d[2] * by.z + d[3] * by.w);
        }
    }

    // Takes the dots of a block, of which this lane has both rows.
    template <typename tile_type>
    __device__ __forceinline__ void finish(const tile_type & tile, int c, int block, scale_and_sum x, int a, int b) {
        const float2 scale = tile.scale(block);
        sums_[c][0]        = fmaf(scale.x * x.x, (float) a, sums_[c][0]);
        sums_[c][1]        = fmaf(scale.y * x.x, (float) b, sums_[c][1]);
        if constexpr (tile_type::has_least) {
            const float2 least = tile.least(block);
            sums_[c][0]        = fmaf(-least.x, x.y, sums_[c][0]);
            sums_[c][1]        = fmaf(-least.y, x.y, sums_[c][1]);
        }
    }

    int                   lane_;
    const int8_t *        quants_[n];
    const scale_and_sum * scales_[n];
    float                 sums_[n][2] = {}; // rows lane / 4 and lane / 4 + 8
};

} // namespace dw::layer_parts
