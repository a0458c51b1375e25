// Activations before a product: a row's norm, and the values of 8 bits that quantised weights are multiplied with.
// Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/dots.cuh"
#include "ops/layer-parts/teams.cuh"

namespace dw::layer_parts {

constexpr int per_thread = 4; // groups of four values: 16 values of a row a thread

constexpr int most_threads = 1024; // of a block

// threads that normalise a row of this width
inline int threads_for(int64_t width) {
    return (int) ((width / (4 * per_thread) + 31) / 32 * 32);
}

__device__ __forceinline__ float4 times(float4 a, float4 b) {
    return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}

__device__ __forceinline__ float4 times(float4 v, float factor) {
    return make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
}

// four values of a row, or zeros
__device__ __forceinline__ float4 four_or_zeros(const float * row, int index, bool is_there) {
    return is_there ? ((const float4 *) row)[index] : make_float4(0, 0, 0, 0);
}

// The groups of four that this thread has of a row; those behind its end are zero.
struct groups {
    float4 at[per_thread];

    static __device__ __forceinline__ int index(int i, const team & by) { return by.thread() + i * by.n_threads(); }

    template <ggml_type type>
    static __device__ __forceinline__ groups of(const void * row, int width, const team & by) {
        groups found;
#pragma unroll
        for (int i = 0; i < per_thread; ++i) {
            const int at = 4 * index(i, by);
            found.at[i]  = at < width ? four_of<type>(row, at) : make_float4(0, 0, 0, 0);
        }
        return found;
    }

    __device__ __forceinline__ groups times(const groups & other) const {
        groups found;
#pragma unroll
        for (int i = 0; i < per_thread; ++i) {
            found.at[i] = dw::layer_parts::times(at[i], other.at[i]);
        }
        return found;
    }

    // this thread's part of it
    __device__ __forceinline__ float dot(const groups & other) const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < per_thread; ++i) {
            sum = add_products(sum, at[i], other.at[i]);
        }
        return sum;
    }
};

// over the lanes that hold a block of 32 values
template <int n_lanes> __device__ __forceinline__ float most_of_block(float x) {
#pragma unroll
    for (int offset = n_lanes / 2; offset > 0; offset /= 2) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, offset));
    }
    return x;
}

__device__ __forceinline__ float magnitude(float4 v) {
    return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

// Four values of 8 bits: v times `factor`, rounded. Finite products of magnitude 127 at most. Conversions to whole
// numbers are slower.
__device__ __forceinline__ int packed(float4 v, float factor) {
    constexpr float whole = 12582912.0f; // 1.5 * 2^23: the last bits of a sum with it are the nearest whole number
    const auto      bits  = [&](float x) { return __float_as_uint(__fadd_rn(__fmul_rn(x, factor), whole)); };
    const uint32_t  low   = __byte_perm(bits(v.x), bits(v.y), 0x0040);
    const uint32_t  high  = __byte_perm(bits(v.z), bits(v.w), 0x0040);
    return (int) __byte_perm(low, high, 0x5410);
}

// A block of 32 values of 8 bits: its scale, and scale * sum of the values.
using scale_and_sum = float2;

// Rows of values of 8 bits, K of them, as quantised weights see them. gap: bytes of values between rows; between their
// scales are half as many, or 8 more. With 32, lanes that read several rows of shared memory meet different banks.
// is_rounded: scales are rounded to half, as in ggml's blocks, but where the norm's factor is applied later: half may
// not hold them then.
template <int gap, bool is_rounded> struct quant_rows {
    scale_and_sum * scales; // [n][scales_of_row(K)]
    int8_t *        quants; // [n][K + gap]
    int             width;  // K, a multiple of 32; of 256 if weights of larger blocks read it

    // two of them are read at once
    static __host__ __device__ constexpr int64_t scales_of_row(int64_t width) {
        return (width / 32 + 1) / 2 * 2 + gap / 16;
    }
    static __host__ __device__ constexpr size_t bytes(int64_t n, int64_t width) {
        return (size_t) n * ((size_t) scales_of_row(width) * sizeof(scale_and_sum) + (size_t) (width + gap));
    }
    // at: aligned to 16 bytes
    static __host__ __device__ quant_rows in(char * at, int64_t n, int64_t width) {
        quant_rows made;
        made.width  = (int) width;
        made.scales = (scale_and_sum *) at;
        made.quants = (int8_t *) (made.scales + n * scales_of_row(width));
        return made;
    }

    __device__ __forceinline__ int8_t *        quants_of(int i) const { return quants + (int64_t) i * (width + gap); }
    __device__ __forceinline__ scale_and_sum * scales_of(int i) const { return scales + i * scales_of_row(width); }

    // Writes group `group` of a row, n times four values, 1 or 2, of which this lane has `v`. All 32 lanes call it, for
    // groups that follow each other.
    template <int n>
    __device__ __forceinline__ void store(int row, int group, const float4 (&v)[n], bool is_there) const {
        constexpr int n_lanes = 8 / n; // of a block
        float         most    = 0.0f;
#pragma unroll
        for (int i = 0; i < n; ++i) {
            most = fmaxf(most, is_there ? magnitude(v[i]) : 0.0f);
        }
        most               = most_of_block<n_lanes>(most);
        const float factor = most == 0.0f ? 0.0f : 127.0f / most;
        const float scale  = is_rounded ? __half2float(__float2half(most / 127.0f)) : most / 127.0f;
        int         fours[n], sum = 0;
#pragma unroll
        for (int i = 0; i < n; ++i) {
            fours[i] = packed(v[i], factor);
            sum      = ggml_cuda_dp4a(fours[i], 0x01010101, sum);
        }
#pragma unroll
        for (int offset = n_lanes / 2; offset > 0; offset /= 2) {
            sum += __shfl_xor_sync(0xffffffff, sum, offset);
        }
        if (is_there) {
            if constexpr (n == 2) {
                ((int2 *) quants_of(row))[group] = make_int2(fours[0], fours[1]);
            } else {
                ((int *) quants_of(row))[group] = fours[0];
            }
            if (group % n_lanes == 0) {
                scales_of(row)[group / n_lanes] = make_float2(scale, scale * (float) sum);
            }
        }
    }

    __device__ __forceinline__ void store(int row, int group, float4 v, bool is_there) const {
        const float4 alone[] = { v };
        store(row, group, alone, is_there);
    }
};

// Where rows of activations lie in a workspace, n rows of K values: as they are, and as quantised weights see them,
// which a block may copy into shared memory as they lie.
struct activations : quant_rows<32, true> {
    using quantised = quant_rows<32, true>;

    float * values; // [n][K]

    static size_t bytes(int64_t n, int64_t width) {
        return (size_t) (n * width) * sizeof(float) + quantised::bytes(n, width);
    }
    // at: aligned to 16 bytes
    static __host__ __device__ activations in(char * at, int64_t n, int64_t width) {
        return { quantised::in(at + n * width * sizeof(float), n, width), (float *) at };
    }
    __device__ __forceinline__ const float * row(int i) const { return values + (int64_t) i * width; }

    // As of quantised ones.
    __device__ __forceinline__ void store(int row, int group, float4 v, bool is_there) const {
        quantised::store(row, group, v, is_there);
        if (is_there) {
            ((float4 *) (values + (int64_t) row * width))[group] = v;
        }
    }

    // Writes the row times `factor`: of each n_parts groups of a thread one, the one of this part.
    __device__ __forceinline__ void store(int row, const groups & of, float factor, const team & by, int part = 0,
                                          int n_parts = 1) const {
#pragma unroll
        for (int i = 0; i < per_thread; ++i) {
            if (i % n_parts != part) {
                continue;
            }
            const int at = groups::index(i, by);
            store(row, at, times(of.at[i], factor), 4 * at < width);
        }
    }
};

// Copies n_bytes, a multiple of 16 as both addresses are. All threads of a block, which have several loads on their
// way.
__device__ __forceinline__ void copy_by_block(void * to, const void * from, size_t n_bytes) {
    constexpr int at_once = 4;
    const int     n = (int) (n_bytes / sizeof(int4)), step = (int) blockDim.x;
    for (int i0 = threadIdx.x; i0 < n; i0 += at_once * step) {
        int4 found[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            found[i] = ((const int4 *) from)[min(i0 + i * step, n - 1)];
        }
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            if (i0 + i * step < n) {
                ((int4 *) to)[i0 + i * step] = found[i];
            }
        }
    }
}

// The sum over threads, given the sums of their warps.
__device__ __forceinline__ float sum_of_warps(const float * sums, int n_warps) {
    float sum = 0.0f;
    for (int warp = 0; warp < n_warps; ++warp) {
        sum += sums[warp];
    }
    return sum;
}

__device__ __forceinline__ float sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x));
}

// y * sigmoid(gate)
__device__ __forceinline__ float4 gated(float4 y, float4 gate) {
    return make_float4(y.x * sigmoid(gate.x), y.y * sigmoid(gate.y), y.z * sigmoid(gate.z), y.w * sigmoid(gate.w));
}

__device__ __forceinline__ float silu(float x) {
    return x * sigmoid(x);
}

} // namespace dw::layer_parts
