// What products take as input, made of other tensors: rows of activations. As a kernel of its own, or by each block of
// a product for itself. Test: tests/gpu/test_layer_parts_cuda.py.
//
// Ahead of the wait for the kernel before, an input asks for what is older than that one. Then teams write a share of
// row `row` each. The kernel has blocks(width) blocks of threads(width) for a row, each of one team. by_products: teams
// of a block of products may write a whole row; can_be_made_by(n): teams of n threads give the same bits. Late ones are
// different: late-inputs.cuh.

#pragma once

#include "ops/door/launch.h"
#include "ops/layer-parts/rows.cuh"

namespace dw::layer_parts {

// A team's share of a row.
struct share {
    team by;
    int  part = 0, n_parts = 1;

    // of n pieces of a row, a warp each: this warp's first, and the distance to its next
    __device__ __forceinline__ int first() const { return part * by.n_warps + by.warp; }
    __device__ __forceinline__ int step() const { return n_parts * by.n_warps; }
};

// Pieces of 128 values that have nothing to do with each other: four a block.
constexpr int threads_of_pieces = 128;

inline int blocks_of_pieces(int64_t width) {
    return (int) ((width + 4 * threads_of_pieces - 1) / (4 * threads_of_pieces));
}

// rms_norm(x) * norm
struct normalised {
    const float * x;
    int64_t       stride;
    const float * norm; // [width]
    float         epsilon;
    int           width;

    static constexpr bool by_products = true;
    static int            threads(int64_t width) { return threads_for(width); }
    static int            blocks(int64_t) { return 1; }
    bool                  can_be_made_by(int n_threads) const { return n_threads == threads_for(width); }

    __device__ __forceinline__ void ask(const team & by) const {
        prefetch(norm, width * (int) sizeof(float), by.thread(), by.n_threads());
    }

    __device__ __forceinline__ void write(int row, const share & mine, const activations & out) const {
        __shared__ float sums[most_threads / 32];
        const team &     by      = mine.by;
        const groups     values  = groups::of<GGML_TYPE_F32>(x + row * stride, width, by);
        const groups     scaled  = values.times(groups::of<GGML_TYPE_F32>(norm, width, by));
        const float      sum     = sum_of_lanes(values.dot(values));
        float * const    of_team = sums + by.number * by.n_warps;
        if (threadIdx.x % 32 == 0) {
            of_team[by.warp] = sum;
        }
        by.meet();
        const float factor = rsqrtf(sum_of_warps(of_team, by.n_warps) / width + epsilon);
        out.store(row, scaled, factor, by, mine.part, mine.n_parts);
    }
};

// x [width, n]
inline normalised normalised_rows(const ggml_tensor * x, const ggml_tensor * norm, float epsilon) {
    return { dw::data_of<const float>(x), dw::stride_of(x, 1), dw::data_of<const float>(norm), epsilon,
             (int) x->ne[0] };
}

// The two of a row, one behind the other: half of a team's threads each.
struct normalised_pair {
    normalised first, second; // of equal width and epsilon

    static constexpr bool by_products = true;
    static int            threads(int64_t width) { return 2 * threads_for(width / 2); }
    static int            blocks(int64_t) { return 1; }
    bool                  can_be_made_by(int n_threads) const { return n_threads == threads(2 * first.width); }

    __device__ __forceinline__ void ask(const team & by) const {
        first.ask(by);
        second.ask(by);
    }

    __device__ __forceinline__ void write(int row, const share & mine, const activations & out) const {
        __shared__ float sums[most_threads / 32];
        const team &     by     = mine.by;
        const int        n_mine = by.n_threads() / 2, which = by.thread() / n_mine, thread = by.thread() % n_mine;
        const float4 *   x =
            (const float4 *) (which == 0 ? first.x + row * first.stride : second.x + row * second.stride);
        const float4 * weights  = (const float4 *) (which == 0 ? first.norm : second.norm);
        const int      n_groups = first.width / 4;
        float4         scaled[per_thread];
        float          sum = 0.0f;
#pragma unroll
        for (int i = 0; i < per_thread; ++i) {
            const int  at       = thread + i * n_mine;
            const bool is_there = at < n_groups;
            float4     v = is_there ? x[at] : make_float4(0, 0, 0, 0), w = is_there ? weights[at] : v;
            sum       = add_products(sum, v, v);
            scaled[i] = times(v, w);
        }
        sum                   = sum_of_lanes(sum);
        float * const of_team = sums + by.number * by.n_warps;
        if (threadIdx.x % 32 == 0) {
            of_team[by.warp] = sum;
        }
        by.meet();
        const float total  = sum_of_warps(of_team + which * (n_mine / 32), n_mine / 32);
        const float factor = rsqrtf(total / first.width + first.epsilon);
#pragma unroll
        for (int i = 0; i < per_thread; ++i) {
            if (i % mine.n_parts != mine.part) {
                continue;
            }
            const int at = thread + i * n_mine;
            out.store(row, which * n_groups + at, times(scaled[i], factor), at < n_groups);
        }
    }
};

// y [heads][size] of a row times sigmoid(gate)
struct gated_heads {
    const float * y;
    int64_t       y_stride;
    const float * gate;
    int64_t       head_stride, row_stride;
    int           size;

    static constexpr bool by_products = true;
    static int            threads(int64_t) { return threads_of_pieces; }
    static int            blocks(int64_t width) { return blocks_of_pieces(width); }
    bool                  can_be_made_by(int) const { return true; }

    __device__ __forceinline__ void ask(const team &) const {}

    __device__ __forceinline__ void write(int row, const share & mine, const activations & out) const {
        for (int first = 128 * mine.first(); first < out.width; first += 128 * mine.step()) {
            const int  i        = first + 4 * (threadIdx.x % 32);
            const bool is_there = i < out.width;
            float4     v        = make_float4(0, 0, 0, 0);
            if (is_there) {
                const float4 a = *(const float4 *) (y + row * y_stride + i);
                const float4 g = *(const float4 *) (gate + row * row_stride + (i / size) * head_stride + i % size);
                v              = gated(a, g);
            }
            out.store(row, i / 4, v, is_there);
        }
    }
};

// x as it is, or rows of it
struct unchanged {
    const float *   x;
    int64_t         stride;
    const int32_t * picked; // nullptr: all in order

    static constexpr bool by_products = false; // an output head has thousands of blocks
    static int            threads(int64_t) { return threads_of_pieces; }
    static int            blocks(int64_t width) { return blocks_of_pieces(width); }

    __device__ __forceinline__ void ask(const team &) const {}

    __device__ __forceinline__ void write(int row, const share & mine, const activations & out) const {
        const float * const from = x + (picked ? picked[row] : row) * stride;
        for (int first = 128 * mine.first(); first < out.width; first += 128 * mine.step()) {
            const int  i        = first + 4 * (threadIdx.x % 32);
            const bool is_there = i < out.width;
            out.store(row, i / 4, is_there ? *(const float4 *) (from + i) : make_float4(0, 0, 0, 0), is_there);
        }
    }
};

template <typename input_type> __global__ void __launch_bounds__(most_threads)
    write_rows(input_type input, activations out) {
    ggml_cuda_pdl_lc();
    input.ask(team::of_block());
    ggml_cuda_pdl_sync();
    input.write(blockIdx.x, { team::of_block(), (int) blockIdx.y, (int) gridDim.y }, out);
}

template <typename input_type>
void launch_input(const input_type & input, const activations & out, int n, cudaStream_t stream) {
    const dim3 blocks(n, input_type::blocks(out.width));
    ggml_cuda_kernel_launch(write_rows<input_type>, { blocks, dim3(input_type::threads(out.width)), 0, stream }, input,
                            out);
}

} // namespace dw::layer_parts
