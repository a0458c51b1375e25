// Dots of one row of weights with a few columns of activations, by one warp. A lane takes the same values of the row
// whatever the number of columns, adds up their products in ascending order, and the lanes' sums are added as a
// butterfly: the bits of a column do not depend on its neighbours.
//
// Q4_K and Q6_K, most of what models are made of, are unpacked here: in wide loads, with activations in an order that
// needs no more. How other types are unpacked is ggml-cuda's (vecdotq.cuh): vec_dot of a block and an offset gives the
// dot of `step` words. Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/layer-parts.h"
#include "vecdotq.cuh"

namespace dw::layer_parts {

// Activations of one row, K values: as they are, and as products of quantised weights see them, in two orders.
struct column {
    const float *      values; // [K]
    const block_q8_1 * blocks; // [K / 32]
    const int8_t *     quants; // [K]
    const float2 *     scales; // [K / 32]: of a block its scale, and scale * sum of its quants
};

__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        x += __shfl_xor_sync(0xffffffff, x, offset);
    }
    return x;
}

template <ggml_type type> constexpr bool are_floats = is_float(type);

template <ggml_type type> struct unpacked;

template <> struct unpacked<GGML_TYPE_Q8_0> {
    static constexpr int   size = QK8_0, words = QI8_0, step = VDR_Q8_0_Q8_1_MMVQ;
    static __device__ auto dot(const void * w, const block_q8_1 * x, int block, int word) {
        return vec_dot_q8_0_q8_1(w, x, block, word);
    }
};

template <> struct unpacked<GGML_TYPE_Q5_K> {
    static constexpr int   size = QK_K, words = QI5_K, step = VDR_Q5_K_Q8_1_MMVQ;
    static __device__ auto dot(const void * w, const block_q8_1 * x, int block, int word) {
        return vec_dot_q5_K_q8_1(w, x, block, word);
    }
};

template <> struct unpacked<GGML_TYPE_IQ4_XS> {
    static constexpr int   size = QK_K, words = QI4_XS, step = VDR_IQ4_XS_Q8_1_MMVQ;
    static __device__ auto dot(const void * w, const block_q8_1 * x, int block, int word) {
        return vec_dot_iq4_xs_q8_1(w, x, block, word);
    }
};

// four weights from index i on; i is a multiple of 4
template <ggml_type type> __device__ __forceinline__ float4 four_of(const void * w, int64_t i) {
    if constexpr (type == GGML_TYPE_F32) {
        return *(const float4 *) ((const float *) w + i);
    } else if constexpr (type == GGML_TYPE_F16) {
        const half2 * at = (const half2 *) ((const half *) w + i);
        const float2  a = __half22float2(at[0]), b = __half22float2(at[1]);
        return make_float4(a.x, a.y, b.x, b.y);
    } else {
        const uint2 at = *(const uint2 *) ((const uint16_t *) w + i);
        return make_float4(__uint_as_float(at.x << 16), __uint_as_float(at.x & 0xffff0000), __uint_as_float(at.y << 16),
                           __uint_as_float(at.y & 0xffff0000));
    }
}

__device__ __forceinline__ float add_products(float sum, float4 a, float4 b) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

__device__ __forceinline__ int dot(uint4 a, int4 b) {
    return ggml_cuda_dp4a(
        (int) a.w, b.w,
        ggml_cuda_dp4a((int) a.z, b.z, ggml_cuda_dp4a((int) a.y, b.y, ggml_cuda_dp4a((int) a.x, b.x, 0))));
}

__device__ __forceinline__ uint4 nibbles(uint4 a, int shift) {
    const uint32_t low = 0x0f0f0f0f;
    return make_uint4(a.x >> shift & low, a.y >> shift & low, a.z >> shift & low, a.w >> shift & low);
}

// A lane's part of a block of Q4_K: 16 bytes, low nibbles of sub-block `sub` and high ones of the next.
struct part_of_q4_K {
    uint4 quants;
    float scale[2], least[2];

    __device__ __forceinline__ part_of_q4_K(const char * block, int lane) {
        const uint4    head = *(const uint4 *) block;
        const int      pair = lane % 8 / 2, shift = pair % 2 * 16;
        const uint32_t a = head.y >> shift, b = head.z >> shift, c = head.w >> shift;
        const uint32_t scales = pair < 2 ? a & 0x3f3f : (c & 0x0f0f) | (a >> 2 & 0x3030);
        const uint32_t leasts = pair < 2 ? b & 0x3f3f : (c >> 4 & 0x0f0f) | (b >> 2 & 0x3030);
        const float2   d      = __half22float2(*(const half2 *) &head.x);
        quants                = *(const uint4 *) (block + 16 + lane % 8 * 16);
        scale[0]              = d.x * (float) (scales & 0xff);
        scale[1]              = d.x * (float) (scales >> 8 & 0xff);
        least[0]              = d.y * (float) (leasts & 0xff);
        least[1]              = d.y * (float) (leasts >> 8 & 0xff);
    }

    // block: of the column
    __device__ __forceinline__ float times(const column & x, int block, int lane) const {
        const int    pair = lane % 8 / 2, side = lane % 2;
        const int4 * at   = (const int4 *) (x.quants + block * QK_K + pair * 64 + side * 16);
        const float4 of   = *(const float4 *) (x.scales + block * 8 + pair * 2); // scale, sum; scale, sum
        const float  dots = fmaf(scale[1] * of.z, (float) dot(nibbles(quants, 4), at[2]),
                                 scale[0] * of.x * (float) dot(nibbles(quants, 0), at[0]));
        // one of the two lanes of a sub-block takes its least value
        return side == 0 ? dots - fmaf(least[1], of.w, least[0] * of.y) : dots;
    }
};

// four bytes from an address that is a multiple of 2
__device__ __forceinline__ uint32_t word_at(const char * at, bool is_odd) {
    const uint32_t * low = (const uint32_t *) (at - (is_odd ? 2 : 0));
    return is_odd ? __byte_perm(low[0], low[1], 0x5432) : low[0];
}

// A lane's part of a block of Q6_K: four words of quants, 32 values apart, less 32 each; and their scales.
struct part_of_q6_K {
    int   quants[4];
    float scale[4];

    __device__ __forceinline__ part_of_q6_K(const char * block, bool is_odd, int lane) {
        const int      side = lane % 16 / 8, word = lane % 8;
        const uint32_t low  = word_at(block + 64 * side + 4 * word, is_odd);
        const uint32_t next = word_at(block + 64 * side + 32 + 4 * word, is_odd);
        const uint32_t high = word_at(block + 128 + 32 * side + 4 * word, is_odd);
        const float    d    = __half2float(*(const half *) (block + 208));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t four = (i % 2 ? next : low) >> (i / 2 * 4) & 0x0f0f0f0f;
            const uint32_t two  = (i < 2 ? high << (4 - 2 * i) : high >> (2 * i - 4)) & 0x30303030;
            quants[i]           = __vsubss4((int) (four | two), 0x20202020);
            scale[i]            = d * (float) *(const int8_t *) (block + 192 + 8 * side + 2 * i + word / 4);
        }
    }

    __device__ __forceinline__ float times(const column & x, int block, int lane) const {
        const int side = lane % 16 / 8, word = lane % 8;
        float     sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = block * QK_K + side * 128 + i * 32 + 4 * word;
            sum          = fmaf(scale[i] * x.scales[at / 32].x,
                                (float) ggml_cuda_dp4a(quants[i], *(const int *) (x.quants + at), 0), sum);
        }
        return sum;
    }
};

template <int n_rows, int n_columns>
__device__ __forceinline__ void add_dots_of_q4_K(float (&sums)[n_rows][n_columns], const char * const (&rows)[n_rows],
                                                 const column (&columns)[n_columns], int n_blocks, int lane) {
    constexpr int n_ahead = n_rows * n_columns <= 2 ? 4 / (n_rows * n_columns) : 1; // turns whose loads are in flight
#pragma unroll n_ahead
    for (int block = lane / 8; block < n_blocks; block += 4) {
#pragma unroll
        for (int m = 0; m < n_rows; ++m) {
            const part_of_q4_K w(rows[m] + block * sizeof(block_q4_K), lane);
#pragma unroll
            for (int c = 0; c < n_columns; ++c) {
                sums[m][c] += w.times(columns[c], block, lane);
            }
        }
    }
}

template <int n_rows, int n_columns>
__device__ __forceinline__ void add_dots_of_q6_K(float (&sums)[n_rows][n_columns], const char * const (&rows)[n_rows],
                                                 const column (&columns)[n_columns], int n_blocks, int lane) {
    constexpr int n_ahead = n_rows * n_columns <= 2 ? 4 / (n_rows * n_columns) : 1;
#pragma unroll n_ahead
    for (int block = lane / 16; block < n_blocks; block += 2) {
#pragma unroll
        for (int m = 0; m < n_rows; ++m) {
            const char *       at = rows[m] + block * sizeof(block_q6_K);
            const part_of_q6_K w(at, (uintptr_t) at % 4 != 0, lane);
#pragma unroll
            for (int c = 0; c < n_columns; ++c) {
                sums[m][c] += w.times(columns[c], block, lane);
            }
        }
    }
}

// sums[m][c] += row m of `rows` times columns[c], of this lane's values
template <ggml_type type, int n_rows, int n_columns>
__device__ __forceinline__ void add_dots(float (&sums)[n_rows][n_columns], const char * const (&rows)[n_rows],
                                         const column (&columns)[n_columns], int n_values, int lane) {
    if constexpr (are_floats<type>) {
        for (int i = 4 * lane; i < n_values; i += 128) {
            float4 x[n_columns];
#pragma unroll
            for (int c = 0; c < n_columns; ++c) {
                x[c] = *(const float4 *) (columns[c].values + i);
            }
#pragma unroll
            for (int m = 0; m < n_rows; ++m) {
                const float4 w = four_of<type>(rows[m], i);
#pragma unroll
                for (int c = 0; c < n_columns; ++c) {
                    sums[m][c] = add_products(sums[m][c], w, x[c]);
                }
            }
        }
    } else if constexpr (type == GGML_TYPE_Q4_K) {
        add_dots_of_q4_K(sums, rows, columns, n_values / QK_K, lane);
    } else if constexpr (type == GGML_TYPE_Q6_K) {
        add_dots_of_q6_K(sums, rows, columns, n_values / QK_K, lane);
    } else {
        using of               = unpacked<type>;
        constexpr int n_lanes  = of::words / of::step;                     // of a block
        constexpr int n_ahead  = n_rows * n_columns <= 4 ? 4 / n_rows : 1; // turns whose loads are in flight together
        const int     n_blocks = n_values / of::size, word = of::step * (lane % n_lanes);
#pragma unroll n_ahead
        for (int block = lane / n_lanes; block < n_blocks; block += 32 / n_lanes) {
#pragma unroll
            for (int m = 0; m < n_rows; ++m) {
#pragma unroll
                for (int c = 0; c < n_columns; ++c) {
                    sums[m][c] += of::dot(rows[m], columns[c].blocks + block * (of::size / 32), block, word);
                }
            }
        }
    }
}

// each lane gets the sums of all
template <int n_rows, int n_columns> __device__ __forceinline__ void add_lanes(float (&sums)[n_rows][n_columns]) {
#pragma unroll
    for (int m = 0; m < n_rows; ++m) {
#pragma unroll
        for (int c = 0; c < n_columns; ++c) {
            sums[m][c] = sum_of_lanes(sums[m][c]);
        }
    }
}

template <ggml_type type> struct type_of {
    static constexpr ggml_type value = type;
};

// call(type_of<type>{}) for one of product_types
template <typename call_type> __device__ __forceinline__ void with_type(ggml_type type, call_type && call) {
    switch (type) {
        case GGML_TYPE_F32:
            return call(type_of<GGML_TYPE_F32>{});
        case GGML_TYPE_F16:
            return call(type_of<GGML_TYPE_F16>{});
        case GGML_TYPE_BF16:
            return call(type_of<GGML_TYPE_BF16>{});
        case GGML_TYPE_Q8_0:
            return call(type_of<GGML_TYPE_Q8_0>{});
        case GGML_TYPE_Q4_K:
            return call(type_of<GGML_TYPE_Q4_K>{});
        case GGML_TYPE_Q5_K:
            return call(type_of<GGML_TYPE_Q5_K>{});
        case GGML_TYPE_Q6_K:
            return call(type_of<GGML_TYPE_Q6_K>{});
        case GGML_TYPE_IQ4_XS:
            return call(type_of<GGML_TYPE_IQ4_XS>{});
        default:
            return; // takes() refused it
    }
}

// Ask for the lines of a row in L2, before what it is multiplied with is there.
__device__ __forceinline__ void prefetch(const char * row, int n_bytes, int lane) {
    for (int at = 128 * lane; at < n_bytes; at += 128 * 32) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row + at));
    }
}

} // namespace dw::layer_parts
