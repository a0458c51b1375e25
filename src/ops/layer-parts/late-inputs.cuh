// Rows that are normalised late: a block of products makes all of them for itself, and products take the norm's factor.
// A kernel less for several rows. Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/inputs.cuh"

namespace dw::layer_parts {

// x * norm, for quantised weights: products are multiplied with rms_norm's factor of their row, rsqrt(mean of squares +
// epsilon). So no value waits for the others of its row, and warps write pieces of any rows.
struct late_normalised {
    normalised input;

    // Where a block of products has n rows.
    struct rows_in_block {
        quant_rows<32, false> x;
        float *               squares; // [n][n_pieces], sums of squares of x
    };

    // of 128 values each, and empty ones up to a multiple of four
    static __host__ __device__ int n_pieces(int64_t width) { return (int) ((width + 511) / 512 * 4); }
    static size_t                  bytes(int64_t n, int64_t width) {
        return quant_rows<32, false>::bytes(n, width) + sizeof(float) * n * n_pieces(width);
    }
    __device__ __forceinline__ rows_in_block in(char * at, int n) const {
        float * const squares = (float *) at;
        return { quant_rows<32, false>::in((char *) (squares + n * n_pieces(input.width)), n, input.width), squares };
    }

    __device__ __forceinline__ void ask(const team & by) const { input.ask(by); }

    // All warps of a block.
    __device__ __forceinline__ void write(int n, const rows_in_block & out) const {
        const int n_of_row = n_pieces(input.width), n_all = n * n_of_row, step = blockDim.x / 32,
                  lane = threadIdx.x % 32;
        for (int p0 = threadIdx.x / 32; p0 < n_all; p0 += at_once * step) {
            float4 values[at_once], norms[at_once];
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const int  piece = min(p0 + i * step, n_all - 1), row = piece / n_of_row;
                const int  at       = (piece - row * n_of_row) * 32 + lane;
                const bool is_there = at < input.width / 4;
                values[i] = is_there ? ((const float4 *) (input.x + row * input.stride))[at] : make_float4(0, 0, 0, 0);
                norms[i]  = is_there ? ((const float4 *) input.norm)[at] : values[i];
            }
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const int piece = p0 + i * step, row = piece / n_of_row, at = (piece - row * n_of_row) * 32 + lane;
                if (piece < n_all) {
                    const float4 v = values[i], w = norms[i];
                    const float  sum = sum_of_lanes(add_products(0.0f, v, v));
                    if (lane == 0) {
                        out.squares[piece] = sum;
                    }
                    out.x.store(row, at, times(v, w), at < input.width / 4);
                }
            }
        }
    }

    // of products of a row
    __device__ __forceinline__ float factor(const rows_in_block & rows, int row) const {
        const int      n    = n_pieces(input.width);
        const float4 * at   = (const float4 *) (rows.squares + row * n);
        float4         sums = at[0];
#pragma unroll 4
        for (int i = 1; i < n / 4; ++i) {
            sums.x += at[i].x;
            sums.y += at[i].y;
            sums.z += at[i].z;
            sums.w += at[i].w;
        }
        const float sum = (sums.x + sums.y) + (sums.z + sums.w);
        return rsqrtf(sum / input.width + input.epsilon);
    }

  private:
    static constexpr int at_once = 2; // pieces of a warp whose loads overlap
};

} // namespace dw::layer_parts
