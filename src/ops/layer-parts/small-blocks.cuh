// Blocks of 32 values of types that no tensor core reads as they lie: their values as bytes. Source: dequantize_row_*
// of ggml-quants.c at the pin. Test: tests/ops/test_cuda_layers.py, tests/gpu/test_layer_parts_cuda.py.
//
// half_row_of<type>(row, side, grid) is half a row of a tile, four blocks: `row` begins at a multiple of 2, `side` is 0
// or 1, and `grid` is grid_of<type>'s, all in shared memory. Callers unroll loops over its blocks.
//   tile_bytes   of a whole row
//   words(k, w)  block k's 32 values, four a word, in order
//   scale(k)     what they count
//   halves()     two bytes with signs of each block, in order: its halves are multiplied by them

#pragma once

#include "ops/layer-parts/unpack-words.cuh"

namespace dw::layer_parts {

constexpr int words_of_block = 8, blocks_of_half_row = blocks_of_tile / 2;

template <ggml_type type> class half_row_of;

__device__ __forceinline__ uint32_t byte_at(const char * at) {
    return *(const uint8_t *) at;
}

__device__ __forceinline__ uint32_t short_at(const char * at) {
    return *(const uint16_t *) at;
}

__device__ __forceinline__ float half_at(const char * at) {
    return __half2float(*(const half *) at);
}

struct in_equal_halves {
    static __device__ __forceinline__ uint2 halves() { return make_uint2(0x01010101, 0x01010101); }
};

// ---- 16 bytes of nibbles behind a head: the lower ones are the first half ----

template <int block_bytes, int head, typename words_type> class half_row_of_nibbles : public in_equal_halves {
  public:
    static constexpr int tile_bytes = blocks_of_tile * block_bytes;

    __device__ __forceinline__ half_row_of_nibbles(const char * row, int side, const char *) :
        at_(row + side * blocks_of_half_row * block_bytes) {}

  protected:
    __device__ __forceinline__ const char * block(int k) const { return at_ + k * block_bytes; }

    // halves_of(a word of nibbles): a word of each half of the block
    template <typename halves_type>
    __device__ __forceinline__ void words_of(int k, uint32_t (&w)[words_of_block], halves_type && halves_of) const {
        const words_type nibbles(block(k) + head);
#pragma unroll
        for (int i = 0; i < words_of_block / 2; ++i) {
            const uint2 both          = halves_of(nibbles.word(4 * i));
            w[i]                      = both.x;
            w[i + words_of_block / 2] = both.y;
        }
    }

  private:
    const char * at_;
};

__device__ __forceinline__ uint2 from_table(uint32_t four, const int8_t * table) {
    const int2 both = get_int_from_table_16((int) four, table);
    return make_uint2((uint32_t) both.x, (uint32_t) both.y);
}

// values less 8, which count 16 times
template <> class half_row_of<GGML_TYPE_Q4_0>
    : public half_row_of_nibbles<sizeof(block_q4_0), sizeof(half), words_from> {
  public:
    using half_row_of_nibbles::half_row_of_nibbles;

    __device__ __forceinline__ void words(int k, uint32_t (&w)[words_of_block]) const {
        words_of(k, w, [](uint32_t four) {
            return make_uint2(ptx::and_xor(four << 4, 0xf0f0f0f0, 0x80808080),
                              ptx::and_xor(four, 0xf0f0f0f0, 0x80808080));
        });
    }
    __device__ __forceinline__ float scale(int k) const { return 0.0625f * half_at(block(k)); }
};

template <> class half_row_of<GGML_TYPE_IQ4_NL>
    : public half_row_of_nibbles<sizeof(block_iq4_nl), sizeof(half), words_from> {
  public:
    using half_row_of_nibbles::half_row_of_nibbles;

    __device__ __forceinline__ void words(int k, uint32_t (&w)[words_of_block]) const {
        words_of(k, w, [](uint32_t four) { return from_table(four, kvalues_iq4nl); });
    }
    __device__ __forceinline__ float scale(int k) const { return half_at(block(k)); }
};

// the scale is a power of two; values count twice
template <> class half_row_of<GGML_TYPE_MXFP4> : public half_row_of_nibbles<sizeof(block_mxfp4), 1, words_from_any> {
  public:
    using half_row_of_nibbles::half_row_of_nibbles;

    __device__ __forceinline__ void words(int k, uint32_t (&w)[words_of_block]) const {
        words_of(k, w, [](uint32_t four) { return from_table(four, kvalues_mxfp4); });
    }
    __device__ __forceinline__ float scale(int k) const {
        const uint32_t exponent = byte_at(block(k));
        return __uint_as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
    }
};

// ---- two bits and, in another array, the third one ----

// Values less 4, which count 32 times; scales of 6 bits less 32, whose upper two bits lie apart. A block's dot is at
// most 2 * 32 * 16 * 128 * 127, just below 2^24, so that a float has it exactly.
template <> class half_row_of<GGML_TYPE_Q3_K> {
  public:
    static constexpr int tile_bytes = sizeof(block_q3_K);

    __device__ __forceinline__ half_row_of(const char * row, int side, const char *) :
        row_(row),
        side_(side) {
        const words_from third(row), two(row + 32 + 32 * side);
#pragma unroll
        for (int i = 0; i < words_of_block; ++i) {
            third_[i] = third.word(4 * i);
            two_[i]   = two.word(4 * i);
        }
    }
    __device__ __forceinline__ void words(int k, uint32_t (&w)[words_of_block]) const {
        const int by = 7 - k - blocks_of_half_row * side_; // lifts the third bit of block k
#pragma unroll
        for (int i = 0; i < words_of_block; ++i) {
            const uint32_t low = 2 * k < 5 ? two_[i] << (5 - 2 * k) : two_[i] >> (2 * k - 5);
            w[i]               = ptx::and_xor(low, 0x60606060, ptx::and_xor(third_[i] << by, 0x80808080, 0x80808080));
        }
    }
    __device__ __forceinline__ float scale(int) const { return 0.03125f * half_at(row_ + 108); }
    __device__ __forceinline__ uint2 halves() const {
        const words_from scales(row_ + 96);
        const uint32_t   high = scales.word(8) >> 4 * side_;
        return make_uint2(less_32(scales.word(0) >> 4 * side_, high), less_32(scales.word(4) >> 4 * side_, high >> 2));
    }

  private:
    // four scales: of each byte the lower four bits of one, and the lower two of the other above them
    static __device__ __forceinline__ uint32_t less_32(uint32_t low, uint32_t high) {
        const uint32_t five = (low & 0x0f0f0f0f) | (high << 4 & 0x10101010);
        return five | (~high << 4 & 0x20202020) * 7; // without the sixth bit a byte is negative
    }

    const char * row_;
    int          side_;
    uint32_t     third_[words_of_block], two_[words_of_block]; // of all blocks
};

} // namespace dw::layer_parts
