// The end of attention of few rows on CUDA: sums over parts of the cells become one sum a row and head, which may be
// gated and made the input of a product. Must not know: how a part is summed up. Test: tests/ops/layer_kernels.py.

#pragma once

#include "ops/door/chain.cuh"
#include "ops/layer-parts/attention-block.cuh"
#include "ops/layer-parts/hadamard.cuh"
#include "ops/layer-parts/rows.cuh"

namespace dw::layer_parts {

constexpr int most_parts     = 1024;
constexpr int quads_of_a_sum = 16, n_classes_of_parts = 16, threads_of_a_sum = quads_of_a_sum * n_classes_of_parts;

__device__ __forceinline__ float4 add(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// of the lane that has the same four values
__device__ __forceinline__ float other_half(float x) {
    return __shfl_xor_sync(0xffffffff, x, quads_of_a_sum);
}

// to[p].x = exp(greatest score of part p - greatest of all), by which the part's sums are multiplied; to[p].y = the sum
// of its weights. All threads of a block.
__device__ __forceinline__ void weigh_parts(float2 (&to)[most_parts], const float2 * ends, int stride, int n_parts) {
    __shared__ float of_warps[threads_of_a_sum / 32];
    float            most = -INFINITY;
    for (int part = threadIdx.x; part < n_parts; part += threads_of_a_sum) {
        to[part] = ends[(int64_t) part * stride];
        most     = fmaxf(most, to[part].x);
    }
    most = most_of_lanes(most);
    if (threadIdx.x % 32 == 0) {
        of_warps[threadIdx.x / 32] = most;
    }
    __syncthreads();
    for (int i = 0; i < threads_of_a_sum / 32; ++i) {
        most = fmaxf(most, of_warps[i]);
    }
    for (int part = threadIdx.x; part < n_parts; part += threads_of_a_sum) {
        to[part].x = to[part].x > -INFINITY ? expf(to[part].x - most) : 0.0f;
    }
    __syncthreads();
}

// What heads are multiplied with, if `data` is there, and where they go then as the input of a product, if `to` is.
struct head_gates {
    const char *           data;
    int64_t                head, row; // strides in bytes
    activations::quantised to;

    __host__ __device__ __forceinline__ bool writes_product_input() const { return to.quants; }

    __device__ __forceinline__ float4 of(int h, int r, int value) const {
        return *(const float4 *) (data + h * head + r * row + value * sizeof(float));
    }
};

// Four values of a pair, and the weights that they count.
struct part_sum {
    float4 values = { 0.0f, 0.0f, 0.0f, 0.0f };
    float  weight = 0.0f;

    // part: its share, the sum of its weights
    __device__ __forceinline__ void add(float2 part, float4 x) {
        const bool counts = !(part.x == 0.0f); // NaN is passed on
        values.x          = counts ? fmaf(part.x, x.x, values.x) : values.x;
        values.y          = counts ? fmaf(part.x, x.y, values.y) : values.y;
        values.z          = counts ? fmaf(part.x, x.z, values.z) : values.z;
        values.w          = counts ? fmaf(part.x, x.w, values.w) : values.w;
        weight            = counts ? fmaf(part.x, part.y, weight) : weight;
    }
};

// The sum of 8 of the 16 classes, which lie `stride` apart: of the even ones if `from` is at class 0, of the odd ones
// if it is at class 1. The order is fixed, so bits do not vary.
template <typename value_type, typename add_type>
__device__ __forceinline__ value_type sum_of_classes(const value_type * from, int stride, add_type && add) {
    const auto at  = [&](int i) { return from[2 * i * stride]; };
    const auto two = [&](int i) { return add(at(i), at(i + 4)); };
    return add(add(two(0), two(2)), add(two(1), two(3)));
}

// Four values of a pair, of the sums of all classes: a lane and the one 16 behind it have half of the classes each. The
// first warp.
__device__ __forceinline__ float4 sum_of_all(const float4 * sums, const float * weights) {
    float4 x = sum_of_classes(sums + threadIdx.x, quads_of_a_sum, add);
    float  w = sum_of_classes(weights + threadIdx.x / quads_of_a_sum, 1, [](float a, float b) { return a + b; });
    x        = add(x, make_float4(other_half(x.x), other_half(x.y), other_half(x.z), other_half(x.w)));
    w += other_half(w);
    return w == 0.0f ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : make_float4(x.x / w, x.y / w, x.z / w, x.w / w);
}

__device__ __forceinline__ float4 transformed(float4 x) {
    float values[] = { x.x, x.y, x.z, x.w };
    apply_hadamard_of_64(values);
    return make_float4(values[0], values[1], values[2], values[3]);
}

// blocks: (pair, stream, 64 values of it). Parts are added up in 16 classes, then these. Two instantiations of the same
// code: keeps_shared (chain.cuh) is an attribute of a function, and only a single row wants it.
template <bool is_single> __global__ void __launch_bounds__(threads_of_a_sum)
    sum_parts(const __grid_constant__ attention_arguments a, int n_parts, int size, head_gates gates) {
    __shared__ float2 parts[most_parts];
    __shared__ float4 sums[threads_of_a_sum];
    __shared__ float  weights[n_classes_of_parts];
    ggml_cuda_pdl_lc();
    const int     quad = threadIdx.x % quads_of_a_sum, which = threadIdx.x / quads_of_a_sum;
    const int     value = (blockIdx.z * quads_of_a_sum + quad) * 4, head = blockIdx.x % a.n_heads;
    const int     row          = blockIdx.y * a.n_rows + blockIdx.x / a.n_heads;
    const int64_t first        = (int64_t) blockIdx.y * n_parts * a.n_pairs() + blockIdx.x;
    const auto    four_of_part = [&](int part) {
        return *(const float4 *) &a.sums[(first + (int64_t) part * a.n_pairs()) * size + value];
    };
    ggml_cuda_pdl_sync();
    // asked for before it is known what it counts
    const float4 ahead = four_of_part(min(which, n_parts - 1));
    const float4 gate  = gates.data && threadIdx.x < 32 ? gates.of(head, row, value) : ahead;
    weigh_parts(parts, a.ends + first, a.n_pairs(), n_parts);
    part_sum mine;
    if (which < n_parts) {
        mine.add(parts[which], ahead);
    }
#pragma unroll 4
    for (int part = which + n_classes_of_parts; part < n_parts; part += n_classes_of_parts) {
        if (!(parts[part].x == 0.0f)) { // of others nothing was written
            mine.add(parts[part], four_of_part(part));
        }
    }
    sums[threadIdx.x] = mine.values;
    if (quad == 0) {
        weights[which] = mine.weight;
    }
    __syncthreads();
    if (threadIdx.x >= 32) {
        return;
    }
    const float4 x = a.is_transformed ? transformed(sum_of_all(sums, weights)) : sum_of_all(sums, weights);
    if (which == 0) {
        *(float4 *) &a.out[((int64_t) row * a.n_heads + head) * size + value] = x;
    }
    if (gates.writes_product_input()) {
        gates.to.store(row, (head * size + value) / 4, gates.data ? gated(x, gate) : x, which == 0);
    }
}

inline void launch_sum(const attention_arguments & a, int n_parts, int size, int n_streams, const head_gates & gates,
                       cudaStream_t stream) {
    const ggml_cuda_kernel_launch_params with = { dim3(a.n_pairs(), n_streams, size / (4 * quads_of_a_sum)),
                                                  dim3(threads_of_a_sum), 0, stream };
    if (a.n_rows * n_streams == 1) {
        launch_kernel<sum_parts<true>, /*keeps_shared*/ true>(with, a, n_parts, size, gates);
    } else {
        launch_kernel<sum_parts<false>>(with, a, n_parts, size, gates);
    }
}

} // namespace dw::layer_parts
