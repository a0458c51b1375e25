// Blocks as in small-blocks.cuh, of types that have magnitudes from a grid, 4 or 8 at once, and signs apart. Source:
// dequantize_row_iq* of ggml-quants.c at the pin. Test: tests/ops/test_cuda_layers.py,
// tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/small-blocks.cuh"

namespace dw::layer_parts {

// Magnitudes by index. A block of threads copies them into its shared memory: lanes of a warp read entries all over a
// grid, which takes some 3 turns of the banks there, and of global memory a turn for each line (ncu, an H200).
template <typename entry_type, int n> class grid_of_magnitudes {
  public:
    static constexpr int bytes = n * sizeof(entry_type);

    __device__ __forceinline__ explicit grid_of_magnitudes(const char * at) :
        at_((const entry_type *) at) {}
    __device__ __forceinline__ entry_type operator[](uint32_t index) const { return at_[index]; }

  private:
    const entry_type * at_;
};

template <ggml_type type> struct grid_of {
    static constexpr int bytes = 0;
};

template <> struct grid_of<GGML_TYPE_IQ2_XXS> : grid_of_magnitudes<uint64_t, 256> {
    using grid_of_magnitudes::grid_of_magnitudes;

    static __device__ __forceinline__ const void * all() { return iq2xxs_grid; }
};

template <> struct grid_of<GGML_TYPE_IQ2_XS> : grid_of_magnitudes<uint64_t, 512> {
    using grid_of_magnitudes::grid_of_magnitudes;

    static __device__ __forceinline__ const void * all() { return iq2xs_grid; }
};

template <> struct grid_of<GGML_TYPE_IQ2_S> : grid_of_magnitudes<uint64_t, 1024> {
    using grid_of_magnitudes::grid_of_magnitudes;

    static __device__ __forceinline__ const void * all() { return iq2s_grid; }
};

template <> struct grid_of<GGML_TYPE_IQ3_XXS> : grid_of_magnitudes<uint32_t, 256> {
    using grid_of_magnitudes::grid_of_magnitudes;

    static __device__ __forceinline__ const void * all() { return iq3xxs_grid; }
};

template <> struct grid_of<GGML_TYPE_IQ3_S> : grid_of_magnitudes<uint32_t, 512> {
    using grid_of_magnitudes::grid_of_magnitudes;

    static __device__ __forceinline__ const void * all() { return iq3s_grid; }
};

// byte i of a word
__device__ __forceinline__ uint32_t byte_of(uint32_t word, int i) {
    return __byte_perm(word, 0, 0x4440 + i);
}

// Of four times seven signs, a byte each, the eighth: it makes the number of negative values even.
__device__ __forceinline__ uint32_t with_eighth(uint32_t seven) {
    uint32_t odd = seven ^ seven << 4; // the highest bit of each byte becomes the sum of all
    odd ^= odd << 2;
    odd ^= odd << 1;
    return seven | (odd & 0x80808080);
}

// four times seven bits as bytes
__device__ __forceinline__ uint32_t in_bytes(uint32_t sevens) {
    return (sevens & 0x7f) | (sevens << 1 & 0x7f00) | (sevens << 2 & 0x7f0000) | (sevens << 3 & 0x7f000000);
}

// A block's 32 signs, in order.
struct signs_of_block {
    uint32_t first, second; // four of eight each, a byte

    __device__ __forceinline__ explicit signs_of_block(uint32_t signs) :
        first(signs & 0x0f0f0f0f),
        second(signs >> 4 & 0x0f0f0f0f) {}
    // Of word i of the block a mask whose bytes are 0xff where a value is negative.
    __device__ __forceinline__ uint32_t mask(int i) const {
        return ptx::highest_bits(byte_of(i % 2 ? second : first, i / 2) * 0x10204080); // bit j becomes bit 8 j + 7
    }
};

// four bytes, negative where `mask` is 0xff; none are 0
__device__ __forceinline__ uint32_t negated(uint32_t four, uint32_t mask) {
    return (four ^ mask) + (mask & 0x01010101);
}

// of odd bytes, whose lowest bit stays as it is
__device__ __forceinline__ uint32_t negated_odd(uint32_t four, uint32_t mask) {
    return four ^ (mask & 0xfefefefe);
}

// scales of four bits of eight halves, each twice as much and one more; four bytes, the lower bits first
__device__ __forceinline__ uint2 odd_halves(uint32_t scales) {
    const uint32_t first  = (scales << 1 & 0x1e1e1e1e) | 0x01010101;
    const uint32_t second = (scales >> 3 & 0x1e1e1e1e) | 0x01010101;
    return make_uint2(__byte_perm(first, second, 0x5140), __byte_perm(first, second, 0x7362));
}

// What the types with grids have in common.
template <ggml_type type> class half_row_of_magnitudes {
  protected:
    __device__ __forceinline__ half_row_of_magnitudes(const char * row, int side, const char * grid) :
        row_(row),
        first_block_(side * blocks_of_half_row),
        grid_(grid) {}

    static __device__ __forceinline__ uint32_t word_of(uint32_t four, const signs_of_block & signs, int i) {
        return negated(four, signs.mask(i));
    }
    static __device__ __forceinline__ void store_eight(uint32_t (&w)[words_of_block], int g, uint64_t eight,
                                                       const signs_of_block & signs) {
        w[2 * g]     = word_of((uint32_t) eight, signs, 2 * g);
        w[2 * g + 1] = word_of((uint32_t) (eight >> 32), signs, 2 * g + 1);
    }

    const char *  row_;
    int           first_block_;
    grid_of<type> grid_;
};

// n words that begin at a multiple of 2
template <int n> struct words_of_half_row {
    uint32_t at[n];

    __device__ __forceinline__ explicit words_of_half_row(const char * from) {
        const words_from words(from);
#pragma unroll
        for (int i = 0; i < n; ++i) {
            at[i] = words.word(4 * i);
        }
    }
};

// A scale of four bits above a block's signs. An odd one counts 1 / `unit`.
template <int unit> __device__ __forceinline__ float scale_above(float d, uint32_t signs) {
    return d * (1.0f / unit) * (float) (2 * (signs >> 28) + 1);
}

// of a block four indices and a word of signs
template <> class half_row_of<GGML_TYPE_IQ2_XXS> : public half_row_of_magnitudes<GGML_TYPE_IQ2_XXS>,
                                                   public in_equal_halves {
  public:
    static constexpr int tile_bytes = sizeof(block_iq2_xxs);

    __device__ __forceinline__ half_row_of(const char * row, int side, const char * grid) :
        half_row_of_magnitudes(row, side, grid),
        blocks_(row + 2 + 8 * first_block_) {}
    __device__ __forceinline__ void words(int k, uint32_t (&w)[words_of_block]) const {
        const signs_of_block signs(with_eighth(in_bytes(blocks_.at[2 * k + 1])));
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            store_eight(w, g, grid_[byte_of(blocks_.at[2 * k], g)], signs);
        }
    }
    __device__ __forceinline__ float scale(int k) const { return scale_above<8>(half_at(row_), blocks_.at[2 * k + 1]); }

  private:
    words_of_half_row<2 * blocks_of_half_row> blocks_;
};

// of a block four times an index of nine bits and seven signs
template <> class half_row_of<GGML_TYPE_IQ2_XS> : public half_row_of_magnitudes<GGML_TYPE_IQ2_XS> {
  public:
    static constexpr int tile_bytes = sizeof(block_iq2_xs);

    __device__ __forceinline__ half_row_of(const char * row, int side, const char * grid) :
        half_row_of_magnitudes(row, side, grid),
        blocks_(row + 2 + 8 * first_block_) {}
    __device__ __forceinline__ void words(int k, uint32_t (&w)[words_of_block]) const {
        const uint32_t       upper = __byte_perm(blocks_.at[2 * k], blocks_.at[2 * k + 1], 0x7531);
        const signs_of_block signs(with_eighth(upper >> 1 & 0x7f7f7f7f));
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            store_eight(w, g, grid_[blocks_.at[2 * k + g / 2] >> g % 2 * 16 & 511], signs);
        }
    }
    __device__ __forceinline__ float scale(int) const { return 0.125f * half_at(row_); }
    __device__ __forceinline__ uint2 halves() const { return odd_halves(words_from(row_ + 66 + first_block_).word(0)); }

  private:
    words_of_half_row<2 * blocks_of_half_row> blocks_;
};

// indices of ten bits, whose upper two lie apart
template <> class half_row_of<GGML_TYPE_IQ2_S> : public half_row_of_magnitudes<GGML_TYPE_IQ2_S> {
  public:
    static constexpr int tile_bytes = sizeof(block_iq2_s);

    __device__ __forceinline__ half_row_of(const char * row, int side, const char * grid) :
        half_row_of_magnitudes(row, side, grid),
        indices_(row + 2 + 4 * first_block_),
        signs_(row + 34 + 4 * first_block_),
        above_(words_from(row + 66 + first_block_).word(0)) {}
    __device__ __forceinline__ void words(int k, uint32_t (&w)[words_of_block]) const {
        const signs_of_block signs(signs_.at[k]);
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            const int      by    = 8 - 8 * k - 2 * g; // lifts the two bits
            const uint32_t above = by > 0 ? above_ << by : above_ >> -by;
            store_eight(w, g, grid_[byte_of(indices_.at[k], g) | (above & 0x300)], signs);
        }
    }
    __device__ __forceinline__ float scale(int) const { return 0.125f * half_at(row_); }
    __device__ __forceinline__ uint2 halves() const { return odd_halves(words_from(row_ + 74 + first_block_).word(0)); }

  private:
    words_of_half_row<blocks_of_half_row> indices_, signs_;
    uint32_t                              above_;
};

template <> class half_row_of<GGML_TYPE_IQ3_XXS> : public half_row_of_magnitudes<GGML_TYPE_IQ3_XXS>,
                                                   public in_equal_halves {
  public:
    static constexpr int tile_bytes = sizeof(block_iq3_xxs);

    __device__ __forceinline__ half_row_of(const char * row, int side, const char * grid) :
        half_row_of_magnitudes(row, side, grid),
        indices_(row + 2 + 8 * first_block_),
        signs_(row + 66 + 4 * first_block_) {}
    __device__ __forceinline__ void words(int k, uint32_t (&w)[words_of_block]) const {
        const signs_of_block signs(with_eighth(in_bytes(signs_.at[k])));
#pragma unroll
        for (int i = 0; i < words_of_block; ++i) {
            w[i] = word_of(grid_[byte_of(indices_.at[2 * k + i / 4], i % 4)], signs, i);
        }
    }
    __device__ __forceinline__ float scale(int k) const { return scale_above<4>(half_at(row_), signs_.at[k]); }

  private:
    words_of_half_row<2 * blocks_of_half_row> indices_;
    words_of_half_row<blocks_of_half_row>     signs_;
};

// indices of nine bits, whose upper one lies apart; magnitudes are odd
template <> class half_row_of<GGML_TYPE_IQ3_S> : public half_row_of_magnitudes<GGML_TYPE_IQ3_S>,
                                                 public in_equal_halves {
  public:
    static constexpr int tile_bytes = sizeof(block_iq3_s);

    __device__ __forceinline__ half_row_of(const char * row, int side, const char * grid) :
        half_row_of_magnitudes(row, side, grid),
        indices_(row + 2 + 8 * first_block_),
        signs_(row + 74 + 4 * first_block_),
        ninths_(words_from(row + 66 + first_block_).word(0)),
        scales_(short_at(row + 106 + 2 * side)) {}
    __device__ __forceinline__ void words(int k, uint32_t (&w)[words_of_block]) const {
        const signs_of_block signs(signs_.at[k]);
#pragma unroll
        for (int i = 0; i < words_of_block; ++i) {
            const int      by    = 8 - 8 * k - i; // lifts the ninth bit
            const uint32_t ninth = by > 0 ? ninths_ << by : ninths_ >> -by;
            const uint32_t index = byte_of(indices_.at[2 * k + i / 4], i % 4) | (ninth & 0x100);
            w[i]                 = negated_odd(grid_[index], signs.mask(i));
        }
    }
    __device__ __forceinline__ float scale(int k) const {
        return half_at(row_) * (float) (2 * (scales_ >> 4 * k & 15) + 1);
    }

  private:
    words_of_half_row<2 * blocks_of_half_row> indices_;
    words_of_half_row<blocks_of_half_row>     signs_;
    uint32_t                                  ninths_, scales_; // a bit of each index, four bits of each block
};

} // namespace dw::layer_parts
