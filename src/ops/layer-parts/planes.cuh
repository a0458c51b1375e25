// Dots of values of 6 bits that are never put together: their lower four bits and their upper two are multiplied apart.
// Two values of four bits share a byte, and four of two bits. A product with the bytes as they lie and one with the
// lower values alone tell them apart, so that nothing is shifted. All in whole numbers, so the bits of a dot are those
// of values put together. It takes more products, which tensor cores have to spare, and more registers.
// Test: tests/ops/test_cuda_layers.py, tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/unpack.cuh"

namespace dw::layer_parts {

// Half a tile, four blocks of 32 values, times n columns. x: this lane's word of a column; four lanes have a half of a
// block, blocks in order. In d this lane has block lane % 4: its halves' dots, less 32 times the column's values, of
// rows lane / 4 and lane / 4 + 8. They count `unit` times.
template <int n> struct dots_of_planes {
    int   d[n][4];
    float unit;

    template <typename tile_type>
    __device__ __forceinline__ dots_of_planes(const tile_type & tile, int half, const uint32_t (&x)[n], int lane) {
        // A block of a byte's upper values has the negative difference, 16 times; upper two bits of four count 4 or 16.
        const bool is_upper = lane % 4 >= 2;
        const int  less = is_upper ? -1 : 0, of_two = lane % 2 ? 4 : 16;
        const int  of_sum = (lane % 2 ? 4 : 1) * (is_upper ? -16 : 1);
        unit              = is_upper ? -0.0625f : 1.0f;
        int low[n][4] = {}, low_high[n][4] = {}, two[n][4], two_two[n][4] = {};
#pragma unroll
        for (int c = 0; c < n; ++c) {
            int sums[4] = {}; // of the column, -2 times
            ptx::multiply_8_bits(sums, make_uint2(0xfefefefe, 0xfefefefe), x[c]);
            two[c][0] = two[c][2] = of_sum * sums[0];
            two[c][1] = two[c][3] = of_sum * sums[1];
        }
        const words_of_a upper = tile.bytes(128 + 32 * half, lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) { // blocks i and i + 2
            const words_of_a bytes = tile.bytes(64 * half + 32 * i, lane);
#pragma unroll
            for (int c = 0; c < n; ++c) {
                const uint32_t mine = lane / 8 % 2 == i ? x[c] : 0;
                const uint2    by   = lane / 4 % 2 ? make_uint2(0, mine) : make_uint2(mine, 0);
                ptx::multiply_8_bits<false>(low_high[c], bytes.at, by);
                ptx::multiply_8_bits<false>(low[c], bytes.masked(0x0f0f0f0f).at, by);
                ptx::multiply_8_bits<false>(two_two[c], upper.masked(i ? 0xcccccccc : 0x33333333).at, by);
                ptx::multiply_8_bits<false>(two[c], upper.masked(i ? 0x0c0c0c0c : 0x03030303).at, by);
            }
        }
#pragma unroll
        for (int c = 0; c < n; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int of_low = low_high[c][i] * less + low[c][i];
                d[c][i]          = two_two[c][i] * (less * of_two) + (two[c][i] * of_two + of_low);
            }
        }
    }
};

} // namespace dw::layer_parts
