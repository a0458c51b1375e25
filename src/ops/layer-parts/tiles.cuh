// Tiles of quantised weights, 16 rows of 256 values, times up to 16 columns of activations on integer tensor cores
// (mma.m16n8k32, m16n8k16; compute capability 8.0 and up). Weights are unpacked from shared memory into registers, in
// the layout that ggml stores them in: unpack.cuh. How they get there: pieces.cuh.
//
// A warp multiplies a tile. Lane l has rows l/4 and l/4 + 8 of it. Dots of blocks of 32 values are exact integers; they
// are scaled and added up in four classes of blocks (unpacked::class_of), in ascending order, then (0 + 1) + (2 + 3).
// So the bits of a column do not depend on its place, on its neighbours, or on which of two ways computes it:
//   many  8 or 16 columns, a column of the tensor core each; a lane has all classes of two columns
//   few   1 or 2 columns, one after another: a column of the tensor core for each of 8 blocks or halves of blocks, so
//         that one chain of products gives all dots; a lane has the class that is its number % 4
// Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/few-columns.cuh"
#include "ops/layer-parts/many-columns.cuh"

#include <type_traits>

namespace dw::layer_parts {

// Where a warp puts its sums: by column, rows side by side. The gaps let lanes meet different banks.
template <int n_columns> constexpr int floats_of_sums = 20 * n_columns;

__device__ __forceinline__ int place_of_sum(int column, int row) {
    return 20 * column + row;
}

template <int n_columns, bool ahead = false> using sums_of =
    std::conditional_t<(n_columns <= 2), few_sums<(n_columns <= 2 ? n_columns : 1), ahead>,
                       many_sums<(n_columns <= 2 ? 1 : n_columns / 8)>>;

template <typename sums_type> __device__ __forceinline__ void store_sums(float * to, const sums_type & sums) {
    sums.each([&](int column, int row, float sum) { to[place_of_sum(column, row)] = sum; });
}

// call(std::integral_constant<int, c>) with the least c of 1, 2, 8, 16 that holds n columns; `most` of them at most.
template <int most, typename call_type> __device__ __forceinline__ void with_columns_of_tile(int n, call_type && call) {
    if (most == 1 || n == 1) {
        return call(std::integral_constant<int, 1>{});
    }
    if constexpr (most > 1) {
        if (n == 2) {
            return call(std::integral_constant<int, 2>{});
        }
    }
    if constexpr (most > 8) {
        if (n > 8) {
            return call(std::integral_constant<int, 16>{});
        }
    }
    if constexpr (most > 2) {
        call(std::integral_constant<int, 8>{});
    }
}

} // namespace dw::layer_parts
