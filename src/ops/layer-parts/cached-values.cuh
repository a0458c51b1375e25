// Neighbours in a row of a KV cache: as the cache stores them, in registers, and as products take them, two of F16 a
// word. Must not know: what is computed of them. Test: tests/ops/layer_kernels.py.

#pragma once

#include "common.cuh"
#include "ops/door/launch.h"

#include <cstdint>
#include <cstring>

namespace dw::layer_parts {

// n adjacent F16 values in registers, loaded at once.
template <int n> union packed_halves {
    uint32_t words[(n + 1) / 2];
    uint4    four;
    uint2    two;

    __device__ __forceinline__ void load(const half * at) {
        if constexpr (n == 8) {
            four = *(const uint4 *) at;
        } else if constexpr (n == 4) {
            two = *(const uint2 *) at;
        } else {
            words[0] = *(const uint32_t *) at;
        }
    }
};

// Rows of a cache by cell, or of a mask by row of the batch. Strides in bytes.
struct strided_rows {
    const char * data;
    int64_t      head, stream;
    int          cell; // of few bits, so that an address takes one instruction

    static strided_rows from(const ggml_tensor * t) {
        return { dw::data_of<const char>(t), (int64_t) t->nb[2], (int64_t) t->nb[3], (int) t->nb[1] };
    }
    __device__ __forceinline__ strided_rows of(int h, int s) const {
        return { data + h * head + s * stream, head, stream, cell };
    }
    __device__ __forceinline__ const char * at(int c) const { return data + (int64_t) c * cell; }
};

// of n values of a row
template <ggml_type type, int n> constexpr int bytes_of =
    type == GGML_TYPE_Q8_0 ? n / QK8_0 * (int) sizeof(block_q8_0) : n * (int) sizeof(half);

// n neighbours: 2, 4 or 8, from a multiple of n on.
template <ggml_type type, int n> class cached_values {
  public:
    static_assert(type == GGML_TYPE_F16, "others have classes of their own");

    __device__ __forceinline__ void load(const char * row, int first) { stored_.load((const half *) row + first); }

    // values 2 i and 2 i + 1
    __device__ __forceinline__ uint32_t two(int i) const { return stored_.words[i]; }

    // They become zero where they are not seen.
    __device__ __forceinline__ void keep_if(bool is_seen) {
#pragma unroll
        for (uint32_t & word : stored_.words) {
            word = is_seen ? word : 0;
        }
    }

  private:
    packed_halves<n> stored_;
};

// Rows begin at multiples of 4 bytes, and so do the quants of every second block.
template <int n> class cached_values<GGML_TYPE_Q8_0, n> {
  public:
    __device__ __forceinline__ void load(const char * row, int first) {
        const char * const     block = row + first / QK8_0 * sizeof(block_q8_0);
        const uint16_t * const at    = (const uint16_t *) (block + sizeof(half) + first % QK8_0);
        scales_                      = *(const uint16_t *) block * 0x10001u;
        if constexpr (n == 2) {
            quants_[0] = at[0];
        } else {
#pragma unroll
            for (int i = 0; i < n / 4; ++i) {
                const bool             is_word = first / QK8_0 % 2; // else two words have it: a block follows
                const uint32_t * const words   = (const uint32_t *) (at - (is_word ? 0 : 1)) + i;
                quants_[i]                     = is_word ? words[0] : __byte_perm(words[0], words[1], 0x5432);
            }
        }
    }

    // Byte q + 128 behind 0x64 is the F16 number 1,152 + q, so that only the product is rounded.
    __device__ __forceinline__ uint32_t two(int i) const {
        const uint32_t order = i % 2 ? 0x4342 : 0x4140;
        const half2    large = as_halves(__byte_perm(quants_[i / 2] ^ 0x80808080, 0x64646464, order));
        const half2    value = __hmul2(__hsub2(large, as_halves(0x64806480)), as_halves(scales_));
        uint32_t       word;
        memcpy(&word, &value, sizeof(word));
        return word;
    }

    __device__ __forceinline__ void keep_if(bool is_seen) {
        scales_ = is_seen ? scales_ : 0;
#pragma unroll
        for (uint32_t & word : quants_) {
            word = is_seen ? word : 0;
        }
    }

  private:
    __device__ __forceinline__ static half2 as_halves(uint32_t word) {
        half2 two;
        memcpy(&two, &word, sizeof(two));
        return two;
    }

    uint32_t quants_[(n + 3) / 4];
    uint32_t scales_; // F16, the same twice
};

} // namespace dw::layer_parts
