// Blocks of 32 values of types that no tensor core reads as they lie: their values as bytes. Source: dequantize_row_*
// of ggml-quants.c at the pin. Test: tests/ops/test_cuda_layers.py, tests/gpu/test_layer_parts_cuda.py.
//
// block_of<type> of block i of a row of a tile, which begins at a multiple of 2:
//   tile_bytes        of that row
//   words(row, i, w)  its 32 values, four a word, in order
//   scale(row, i)     what they count
//   halves(row, i)    two bytes with signs, by which its halves are multiplied

#pragma once

#include "ops/layer-parts/unpack-words.cuh"

namespace dw::layer_parts {

constexpr int words_of_block = 8;

template <ggml_type type> struct block_of;

__device__ __forceinline__ uint32_t byte_at(const char * at) {
    return *(const uint8_t *) at;
}

__device__ __forceinline__ uint32_t short_at(const char * at) {
    return *(const uint16_t *) at;
}

__device__ __forceinline__ float half_at(const char * at) {
    return __half2float(*(const half *) at);
}

// a word at any address, read with the word behind it
__device__ __forceinline__ uint32_t word_at(const char * at) {
    const int        odd = (uintptr_t) at & 3;
    const uint32_t * of  = (const uint32_t *) (at - odd);
    return __byte_perm(of[0], of[1], 0x3210 + 0x1111 * odd);
}

struct in_equal_halves {
    static __device__ __forceinline__ uint32_t halves(const char *, int) { return 0x0101; }
};

// ---- 16 bytes of nibbles behind a head: the lower ones are the first half ----

template <int block_bytes, int head, typename half_words> __device__ __forceinline__ void
words_of_nibbles(const char * row, int i, uint32_t (&w)[words_of_block], half_words && words_of) {
#pragma unroll
    for (int k = 0; k < words_of_block / 2; ++k) {
        const uint2 both          = words_of(word_at(row + i * block_bytes + head + 4 * k));
        w[k]                      = both.x;
        w[k + words_of_block / 2] = both.y;
    }
}

__device__ __forceinline__ uint2 from_table(uint32_t four, const int8_t * table) {
    const int2 both = get_int_from_table_16((int) four, table);
    return make_uint2((uint32_t) both.x, (uint32_t) both.y);
}

// values less 8, which count 16 times
template <> struct block_of<GGML_TYPE_Q4_0> : in_equal_halves {
    static constexpr int bytes = sizeof(block_q4_0), tile_bytes = blocks_of_tile * bytes;

    static __device__ __forceinline__ void words(const char * row, int i, uint32_t (&w)[words_of_block]) {
        words_of_nibbles<bytes, 2>(row, i, w, [](uint32_t four) {
            return make_uint2(ptx::and_xor(four << 4, 0xf0f0f0f0, 0x80808080),
                              ptx::and_xor(four, 0xf0f0f0f0, 0x80808080));
        });
    }
    static __device__ __forceinline__ float scale(const char * row, int i) {
        return 0.0625f * half_at(row + i * bytes);
    }
};

template <> struct block_of<GGML_TYPE_IQ4_NL> : in_equal_halves {
    static constexpr int bytes = sizeof(block_iq4_nl), tile_bytes = blocks_of_tile * bytes;

    static __device__ __forceinline__ void words(const char * row, int i, uint32_t (&w)[words_of_block]) {
        words_of_nibbles<bytes, 2>(row, i, w, [](uint32_t four) { return from_table(four, kvalues_iq4nl); });
    }
    static __device__ __forceinline__ float scale(const char * row, int i) { return half_at(row + i * bytes); }
};

// the scale is a power of two; values count twice
template <> struct block_of<GGML_TYPE_MXFP4> : in_equal_halves {
    static constexpr int bytes = sizeof(block_mxfp4), tile_bytes = blocks_of_tile * bytes;

    static __device__ __forceinline__ void words(const char * row, int i, uint32_t (&w)[words_of_block]) {
        words_of_nibbles<bytes, 1>(row, i, w, [](uint32_t four) { return from_table(four, kvalues_mxfp4); });
    }
    static __device__ __forceinline__ float scale(const char * row, int i) {
        const uint32_t exponent = byte_at(row + i * bytes);
        return __uint_as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
    }
};

// ---- two bits and, in another array, the third one ----

// Values less 4, which count 32 times; scales of 6 bits less 32, whose upper two bits lie apart. A block's dot is at
// most 2 * 32 * 16 * 128 * 127, just below 2^24, so that a float has it exactly.
template <> struct block_of<GGML_TYPE_Q3_K> {
    static constexpr int tile_bytes = sizeof(block_q3_K), bytes_of_two = 32, scales_at = 96, d_at = 108;

    static __device__ __forceinline__ void words(const char * row, int i, uint32_t (&w)[words_of_block]) {
        const words_from third(row), two(row + bytes_of_two + 32 * (i / 4));
#pragma unroll
        for (int k = 0; k < words_of_block; ++k) {
            const uint32_t low = two.word(4 * k) >> (2 * (i % 4)) << 5;
            w[k] = ptx::and_xor(low, 0x60606060, ptx::and_xor(third.word(4 * k) >> i << 7, 0x80808080, 0x80808080));
        }
    }
    static __device__ __forceinline__ float    scale(const char * row, int) { return 0.03125f * half_at(row + d_at); }
    static __device__ __forceinline__ uint32_t halves(const char * row, int i) {
        const char *   scales = row + scales_at;
        const uint32_t low    = short_at(scales + 2 * (i % 4)) >> (i / 4 * 4) & 0x0f0f;
        const uint32_t high   = short_at(scales + 8 + 2 * (i % 2)) >> (i / 2 * 2) & 0x0303;
        const uint32_t both   = low | high << 4;
        return ((both & 0xff) - 32 & 0xff) | ((both >> 8) - 32 & 0xff) << 8;
    }
};

// ---- sizes from a grid, 4 or 8 at once; signs apart ----

// four bytes, none of them 0, negative where their bit of four is set
__device__ __forceinline__ uint32_t with_signs(uint32_t four, uint32_t signs) {
    const uint32_t ones = (signs & 15) * 0x00204081 & 0x01010101;
    return (four ^ ones * 0xff) + ones;
}

// Of seven signs the eighth: there is an even number of negative ones.
__device__ __forceinline__ uint32_t eight_signs(uint32_t seven) {
    seven &= 127;
    return seven | (__popc(seven) & 1) << 7;
}

__device__ __forceinline__ void store_eight(uint32_t (&w)[words_of_block], int g, uint32_t first, uint32_t second,
                                            uint32_t signs) {
    w[2 * g]     = with_signs(first, signs);
    w[2 * g + 1] = with_signs(second, signs >> 4);
}

__device__ __forceinline__ void store_eight(uint32_t (&w)[words_of_block], int g, uint64_t eight, uint32_t signs) {
    store_eight(w, g, (uint32_t) eight, (uint32_t) (eight >> 32), signs);
}

// two halves' scales of four bits, each twice as much and one more
__device__ __forceinline__ uint32_t odd_halves(uint32_t scales) {
    return (scales << 1 & 0x1e) | (scales << 5 & 0x1e00) | 0x0101;
}

// Four times seven signs and a scale of four bits are a word of a block, at `first` and every `step` bytes on. An odd
// scale counts 1 / `unit`.
template <int first, int step, int unit> struct signs_beside_scale : in_equal_halves {
    static __device__ __forceinline__ uint32_t signs_and_scale(const char * row, int i) {
        return words_from(row + first + step * i).word(0);
    }
    static __device__ __forceinline__ float scale(const char * row, int i) {
        return half_at(row) * (1.0f / unit) * (float) (2 * (signs_and_scale(row, i) >> 28) + 1);
    }
};

template <> struct block_of<GGML_TYPE_IQ2_XXS> : signs_beside_scale<6, 8, 8> {
    static constexpr int tile_bytes = sizeof(block_iq2_xxs);

    static __device__ __forceinline__ void words(const char * row, int i, uint32_t (&w)[words_of_block]) {
        const uint32_t signs = signs_and_scale(row, i);
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            store_eight(w, g, iq2xxs_grid[byte_at(row + 2 + 8 * i + g)], eight_signs(signs >> 7 * g));
        }
    }
};

template <> struct block_of<GGML_TYPE_IQ2_XS> {
    static constexpr int tile_bytes = sizeof(block_iq2_xs);

    static __device__ __forceinline__ void words(const char * row, int i, uint32_t (&w)[words_of_block]) {
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            const uint32_t of = short_at(row + 2 + 8 * i + 2 * g);
            store_eight(w, g, iq2xs_grid[of & 511], eight_signs(of >> 9));
        }
    }
    static __device__ __forceinline__ float    scale(const char * row, int) { return 0.125f * half_at(row); }
    static __device__ __forceinline__ uint32_t halves(const char * row, int i) {
        return odd_halves(byte_at(row + 66 + i));
    }
};

template <> struct block_of<GGML_TYPE_IQ2_S> {
    static constexpr int tile_bytes = sizeof(block_iq2_s);

    static __device__ __forceinline__ void words(const char * row, int i, uint32_t (&w)[words_of_block]) {
        const uint32_t above = byte_at(row + 66 + i);
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            const uint32_t of = byte_at(row + 2 + 4 * i + g) | (above >> 2 * g << 8 & 0x300);
            store_eight(w, g, iq2s_grid[of], byte_at(row + 34 + 4 * i + g));
        }
    }
    static __device__ __forceinline__ float    scale(const char * row, int) { return 0.125f * half_at(row); }
    static __device__ __forceinline__ uint32_t halves(const char * row, int i) {
        return odd_halves(byte_at(row + 74 + i));
    }
};

template <> struct block_of<GGML_TYPE_IQ3_XXS> : signs_beside_scale<66, 4, 4> {
    static constexpr int tile_bytes = sizeof(block_iq3_xxs);

    static __device__ __forceinline__ void words(const char * row, int i, uint32_t (&w)[words_of_block]) {
        const uint32_t signs = signs_and_scale(row, i);
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            const uint32_t two = short_at(row + 2 + 8 * i + 2 * g);
            store_eight(w, g, iq3xxs_grid[two & 255], iq3xxs_grid[two >> 8], eight_signs(signs >> 7 * g));
        }
    }
};

template <> struct block_of<GGML_TYPE_IQ3_S> : in_equal_halves {
    static constexpr int tile_bytes = sizeof(block_iq3_s);

    static __device__ __forceinline__ void words(const char * row, int i, uint32_t (&w)[words_of_block]) {
        const uint32_t ninths = byte_at(row + 66 + i);
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            const uint32_t two = short_at(row + 2 + 8 * i + 2 * g), ninth = ninths >> 2 * g;
            store_eight(w, g, iq3s_grid[(two & 255) | (ninth << 8 & 256)], iq3s_grid[(two >> 8) | (ninth << 7 & 256)],
                        byte_at(row + 74 + 4 * i + g));
        }
    }
    static __device__ __forceinline__ float scale(const char * row, int i) {
        return half_at(row) * (float) (2 * (byte_at(row + 106 + i / 2) >> (i % 2 * 4) & 15) + 1);
    }
};

} // namespace dw::layer_parts
