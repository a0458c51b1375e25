// Rows that are normalised late: products take the norm's factor. Of one row or two, each block of products makes all
// of them for itself, which saves a kernel. Of more, a kernel before makes them, and each block copies them. Test:
// tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/door/chain.cuh"
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

    // of 256 values each, and empty ones up to a multiple of four
    static __host__ __device__ int n_pieces(int64_t width) { return (int) ((width + 1023) / 1024 * 4); }
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
        write<pieces_at_once>(n, out, threadIdx.x / 32, blockDim.x / 32);
    }

    // pieces first, first + step, ... of all rows. One warp. Loads of at_once pieces overlap.
    template <int at_once>
    __device__ __forceinline__ void write(int n, const rows_in_block & out, int first, int step) const {
        const int n_all = n * n_pieces(input.width);
        for (int p0 = first; p0 < n_all; p0 += at_once * step) {
            eight_of_piece mine[at_once];
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                mine[i] = eight_of(min(p0 + i * step, n_all - 1));
            }
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                if (p0 + i * step < n_all) {
                    write(p0 + i * step, mine[i], out);
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
    static constexpr int pieces_at_once = 2;

    // A lane's part of a piece, and the norm's.
    struct eight_of_piece {
        float4 x[2], norm[2];
        int    row, at; // at: in units of 8 values
        bool   is_there;
    };

    __device__ __forceinline__ eight_of_piece eight_of(int piece) const {
        const int      n_of_row = n_pieces(input.width);
        eight_of_piece v;
        v.row           = piece / n_of_row;
        v.at            = (piece - v.row * n_of_row) * 32 + threadIdx.x % 32;
        v.is_there      = v.at < input.width / 8;
        const int first = v.is_there ? 2 * v.at : 0; // so that no load waits for another one's value
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            v.x[i]    = ((const float4 *) (input.x + v.row * input.stride))[first + i];
            v.norm[i] = ((const float4 *) input.norm)[first + i];
        }
        return v;
    }

    static __device__ __forceinline__ void write(int piece, const eight_of_piece & v, const rows_in_block & out) {
        float4 scaled[2];
        float  sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float4 x = v.is_there ? v.x[i] : make_float4(0, 0, 0, 0);
            sum            = add_products(sum, x, x);
            scaled[i]      = times(x, v.norm[i]);
        }
        sum = sum_of_lanes(sum);
        if (threadIdx.x % 32 == 0) {
            out.squares[piece] = sum;
        }
        out.x.store(v.row, v.at, scaled, v.is_there);
    }
};

// The same, of rows that a kernel before made for all blocks: each copies them.
struct late_made {
    late_normalised of;
    char *          at; // memory for bytes(n, width), aligned to 16 bytes

    using rows_in_block = late_normalised::rows_in_block;
    static size_t bytes(int64_t n, int64_t width) { return late_normalised::bytes(n, width); }

    __device__ __forceinline__ rows_in_block in(char * memory, int n) const { return of.in(memory, n); }
    __device__ __forceinline__ void          ask(const team &) const {}
    __device__ __forceinline__ float factor(const rows_in_block & rows, int row) const { return of.factor(rows, row); }

    // All warps of a block.
    __device__ __forceinline__ void write(int n, const rows_in_block & out) const {
        copy_by_block(out.squares, at, (char *) out.x.quants_of(n) - (char *) out.squares);
    }
};

// Of a block. Small blocks with few registers find room while the kernel in front still runs.
constexpr int warps_of_making = 2;

// Makes them: a warp a piece.
template <typename rows_type> __global__ void __launch_bounds__(32 * warps_of_making)
    make_late(const rows_type rows, int n) {
    ggml_cuda_pdl_lc();
    rows.of.ask(team::of_block());
    ggml_cuda_pdl_sync();
    rows.of.template write<1>(n, rows.in(rows.at, n), blockIdx.x * warps_of_making + threadIdx.x / 32,
                              gridDim.x * warps_of_making);
}

static inline void launch_making(const late_made & rows, int n, cudaStream_t stream) {
    const int n_pieces = n * late_normalised::n_pieces(rows.of.input.width);
    dw::launch_kernel<make_late<late_made>, /*keeps_shared*/ true>(
        { dim3(dw::n_blocks(n_pieces, warps_of_making)), dim3(32 * warps_of_making), 0, stream }, rows, n);
}

} // namespace dw::layer_parts
