// Heads of a delta-net layer on their way to its output's product: y * norm * silu(z) in blocks of 8 bits, whose scales
// take the factor of the head's norm. A single row's blocks are made by the delta rule's kernel, which has 32 values of
// a head, so blocks of products put the factor in. Others have a kernel of their own. The bits are the same. Heads of
// an attention layer come from it gated and whole (flash-attention.cu).
// Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/rows.cuh"

namespace dw::layer_parts {

// 32 values of a head, without its factor; this lane's value.
struct gated_block {
    float         value;
    int8_t        quant;
    scale_and_sum scale;
    float         squares; // of y

    // A warp.
    __device__ __forceinline__ gated_block(float y, float norm, float z) :
        value(y * norm * silu(z)) {
        const float most = most_of_lanes(fabsf(value));
        const int   four = __float2int_rn(value * (most == 0.0f ? 0.0f : 127.0f / most));
        quant            = (int8_t) four;
        scale.x          = most / 127.0f;
        scale.y          = scale.x * sum_of_lanes((float) four);
        squares          = sum_of_lanes(__fmul_rn(y, y)); // never joined with a sum: kernels must agree
    }
};

// of a head of `size` values
__device__ __forceinline__ float factor_of_head(float squares, int size, float epsilon) {
    return rsqrtf(__fadd_rn(squares / size, epsilon));
}

__device__ __forceinline__ scale_and_sum times(scale_and_sum x, float factor) {
    return make_float2(x.x * factor, x.y * factor);
}

// y, z [n][K]; norm [size]. Blocks: (row, head); a thread a value, a multiple of 32.
static __global__ void gate_heads(const float * y, const float * z, const float * norm, float epsilon,
                                  activations out) {
    __shared__ float sums[most_threads / 32];
    ggml_cuda_pdl_lc();
    const int   size = blockDim.x, value = blockIdx.y * size + threadIdx.x;
    const float weight = norm[threadIdx.x];
    ggml_cuda_pdl_sync();
    const int64_t     at = (int64_t) blockIdx.x * out.width + value;
    const gated_block of(y[at], weight, z[at]);
    if (threadIdx.x % 32 == 0) {
        sums[threadIdx.x / 32] = of.squares;
    }
    __syncthreads();
    const float factor               = factor_of_head(sum_of_warps(sums, size / 32), size, epsilon);
    out.values[at]                   = of.value * factor;
    out.quants_of(blockIdx.x)[value] = of.quant;
    if (threadIdx.x % 32 == 0) {
        out.scales_of(blockIdx.x)[value / 32] = times(of.scale, factor);
    }
}

// A row's blocks in memory.
struct gated_row {
    int8_t *        quants;  // [K]
    scale_and_sum * scales;  // [K / 32]
    float *         squares; // [K / 32]

    // at: aligned to 16 bytes, delta_step::n_gated(width) values
    static gated_row in(float * at, int64_t width) {
        return { (int8_t *) at, (scale_and_sum *) (at + width / 4), at + width / 4 + width / 16 };
    }
    // A warp.
    __device__ __forceinline__ void store(int block, const gated_block & of) const {
        const int lane            = threadIdx.x % 32;
        quants[32 * block + lane] = of.quant;
        if (lane == 0) {
            scales[block]  = of.scale;
            squares[block] = of.squares;
        }
    }
};

// It as the input of products with quantised weights: each block copies it.
struct late_gated {
    gated_row from;
    float     epsilon;
    int       width, size; // K, of a head

    using rows = quant_rows<0, false>;
    struct rows_in_block {
        rows x;
    };

    static size_t                            bytes(int64_t, int64_t width) { return rows::bytes(1, width); }
    __device__ __forceinline__ rows_in_block in(char * at, int) const { return { rows::in(at, 1, width) }; }
    __device__ __forceinline__ void          ask(const team &) const {}

    // All warps of a block.
    __device__ __forceinline__ void write(int, const rows_in_block & out) const {
        const int n_loads = width / 16, of_head = size / 32;
        int4      first = {};
        if ((int) threadIdx.x < n_loads) {
            first = ((const int4 *) from.quants)[threadIdx.x];
        }
        for (int i = threadIdx.x; i < width / 32; i += blockDim.x) {
            const float * squares = from.squares + i / of_head * of_head;
            float         sum     = 0.0f;
            for (int j = 0; j < of_head; ++j) {
                sum += squares[j];
            }
            out.x.scales[i] = times(from.scales[i], factor_of_head(sum, size, epsilon));
        }
        if ((int) threadIdx.x < n_loads) {
            ((int4 *) out.x.quants)[threadIdx.x] = first;
        }
        for (int i = threadIdx.x + blockDim.x; i < n_loads; i += blockDim.x) {
            ((int4 *) out.x.quants)[i] = ((const int4 *) from.quants)[i];
        }
    }
};

// Rows of values of 8 bits as they lie, as the input of products with quantised weights: each block copies them.
struct late_quants {
    using rows = activations::quantised;
    rows from;

    struct rows_in_block {
        rows x;
    };

    static size_t                            bytes(int64_t n, int64_t width) { return rows::bytes(n, width); }
    __device__ __forceinline__ rows_in_block in(char * at, int n) const { return { rows::in(at, n, from.width) }; }
    __device__ __forceinline__ void          ask(const team &) const {}

    // All warps of a block.
    __device__ __forceinline__ void write(int n, const rows_in_block & out) const {
        copy_by_block(out.x.scales, from.scales, rows::bytes(n, from.width));
    }
};

} // namespace dw::layer_parts
