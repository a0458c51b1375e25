// Blocks of 256 values with scales of their parts: Q4_K, Q5_K and Q6_K. See unpack-words.cuh.
// Test: tests/ops/test_cuda_layers.py, tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/unpack-words.cuh"

namespace dw::layer_parts {

// Scales and least values of a block of Q4_K or Q5_K.
struct scales_of_K {
    uint32_t scales[2], leasts[2];
    float    d, d_less, least, least_less;

    __device__ __forceinline__ explicit scales_of_K(const char * block) {
        const uint4  head = *(const uint4 *) block;
        const float2 of   = __half22float2(*(const half2 *) &head.x);
        scales[0]         = head.y & 0x3f3f3f3f;
        scales[1]         = (head.w & 0x0f0f0f0f) | (head.y >> 2 & 0x30303030);
        leasts[0]         = head.z & 0x3f3f3f3f;
        leasts[1]         = (head.w >> 4 & 0x0f0f0f0f) | (head.z >> 2 & 0x30303030);
        d                 = of.x;
        d_less            = of.x * -8388608.0f;
        least             = of.y;
        least_less        = of.y * -8388608.0f;
    }
    __device__ __forceinline__ float scale(int i) const {
        return times_byte(i < 4 ? scales[0] : scales[1], i % 4, d, d_less);
    }
    __device__ __forceinline__ float least_value(int i) const {
        return times_byte(i < 4 ? leasts[0] : leasts[1], i % 4, least, least_less);
    }
};

template <> struct unpacked<GGML_TYPE_Q4_K> : in_blocks_of_32 {
    static constexpr bool is_signed = false, has_least = true, is_cut = false, has_nibbles = true;
    const char *          a, *b;
    scales_of_K           of_a, of_b;

    __device__ __forceinline__ unpacked(const char * row, const char * row8, int lane) :
        a(row + 16 + 8 * (lane % 4)),
        b(row8 + 16 + 8 * (lane % 4)),
        of_a(row),
        of_b(row8) {}
    __device__ __forceinline__ words_of_a nibbles(int i) const {
        const uint2 x = *(const uint2 *) (a + 32 * i), y = *(const uint2 *) (b + 32 * i);
        return { { x.x, y.x, x.y, y.y } };
    }
    // high nibbles count 16 times
    __device__ __forceinline__ words_of_a words(int i) const {
        return nibbles(i / 2).masked(i % 2 ? 0xf0f0f0f0 : 0x0f0f0f0f);
    }
    __device__ __forceinline__ float2 scale(int i) const {
        const float by = i % 2 ? 0.0625f : 1.0f;
        return make_float2(by * of_a.scale(i), by * of_b.scale(i));
    }
    __device__ __forceinline__ float2 least(int i) const {
        return make_float2(of_a.least_value(i), of_b.least_value(i));
    }
    static __device__ __forceinline__ uint2 values(const int8_t * x, int lane) { return side_by_side(x, lane); }
};

template <> struct unpacked<GGML_TYPE_Q5_K> : in_blocks_of_32 {
    static constexpr bool is_signed = false, has_least = true, is_cut = false;
    const char *          a, *b;
    scales_of_K           of_a, of_b;
    uint2                 fifth_a, fifth_b; // a bit of each step

    __device__ __forceinline__ unpacked(const char * row, const char * row8, int lane) :
        a(row + 48 + 8 * (lane % 4)),
        b(row8 + 48 + 8 * (lane % 4)),
        of_a(row),
        of_b(row8),
        fifth_a(*(const uint2 *) (row + 16 + 8 * (lane % 4))),
        fifth_b(*(const uint2 *) (row8 + 16 + 8 * (lane % 4))) {}
    static __device__ __forceinline__ uint32_t word(uint32_t four, uint32_t fifth, int i) {
        return (four >> (i % 2 * 4) & 0x0f0f0f0f) | (fifth >> i & 0x01010101) << 4;
    }
    __device__ __forceinline__ words_of_a words(int i) const {
        const uint2 x = *(const uint2 *) (a + 32 * (i / 2)), y = *(const uint2 *) (b + 32 * (i / 2));
        return { { word(x.x, fifth_a.x, i), word(y.x, fifth_b.x, i), word(x.y, fifth_a.y, i),
                   word(y.y, fifth_b.y, i) } };
    }
    __device__ __forceinline__ float2 scale(int i) const { return make_float2(of_a.scale(i), of_b.scale(i)); }
    __device__ __forceinline__ float2 least(int i) const {
        return make_float2(of_a.least_value(i), of_b.least_value(i));
    }
    static __device__ __forceinline__ uint2 values(const int8_t * x, int lane) { return side_by_side(x, lane); }
};

// Where a row of a tile begins: at a multiple of 2, at one of 4, or 2 bytes behind one of 4.
// Of the latter, columns may be stored in the order of rotated().
enum class place_of_rows { any, even, odd, odd_by_rotated };

// This lane's words of a row, at distances in bytes that are multiples of 4.
template <place_of_rows place> struct words_at : words_from {
    using words_from::words_from;
};

template <> class words_at<place_of_rows::even> {
  public:
    __device__ __forceinline__ explicit words_at(const char * at) :
        at_((const uint32_t *) at) {}
    __device__ __forceinline__ uint32_t word(int distance) const { return at_[distance / 4]; }
    __device__ __forceinline__ uint32_t word_of_16(int distance, int) const { return word(distance); }

  private:
    const uint32_t * at_;
};

template <> class words_at<place_of_rows::odd> {
  public:
    __device__ __forceinline__ explicit words_at(const char * at) :
        at_((const uint32_t *) (at - 2)) {}
    __device__ __forceinline__ uint32_t word(int distance) const {
        const uint32_t * of = at_ + distance / 4;
        return __byte_perm(of[0], of[1], 0x5432);
    }
    // The lane's part of 16 bytes in the order of rotated(): words that lie at multiples of 4, but for lane 3.
    __device__ __forceinline__ uint32_t word_of_16(int distance, int lane) const {
        const uint32_t * of = at_ + distance / 4 + 1;
        return __byte_perm(of[0], of[-4], lane % 4 == 3 ? 0x7610 : 0x3210);
    }

  private:
    const uint32_t * at_;
};

template <> class words_at<place_of_rows::odd_by_rotated> {
  public:
    __device__ __forceinline__ explicit words_at(const char * at) :
        at_((const uint32_t *) (at + 2)),
        pick_(threadIdx.x % 4 == 3 ? 0x7610 : 0x3210) {}
    __device__ __forceinline__ uint32_t word(int distance) const {
        const uint32_t * of = at_ + distance / 4;
        return __byte_perm(of[0], of[-4], pick_);
    }
    __device__ __forceinline__ uint32_t word_of_16(int distance, int) const { return word(distance); }

  private:
    const uint32_t * at_;
    uint32_t         pick_;
};

// 16 values of a column, a word a lane of four, as operands of rows that are odd: bytes 2 to 5, 6 to 9, 10 to 13, and
// 14, 15, 0, 1.
__device__ __forceinline__ uint32_t rotated(uint32_t word, int lane) {
    return __byte_perm(word, __shfl_sync(0xffffffff, word, lane / 4 * 4 + (lane + 1) % 4), 0x5432);
}

// All 16 values at once.
__device__ __forceinline__ int4 rotated(int4 x) {
    return make_int4(__byte_perm(x.x, x.y, 0x5432), __byte_perm(x.y, x.z, 0x5432), __byte_perm(x.z, x.w, 0x5432),
                     __byte_perm(x.w, x.x, 0x5432));
}

// Of rows of which it is known whether they are even: has_planes. As operands values less 32 count 4 times.
template <place_of_rows place> struct tile_of_Q6_K : in_halves_of_blocks {
    static constexpr bool has_planes = place != place_of_rows::any, is_rotated = place == place_of_rows::odd;
    words_at<place>       a, b; // this lane's words
    const char *          scales_a, *scales_b;
    float                 d_a, d_b;

    __device__ __forceinline__ tile_of_Q6_K(const char * row, const char * row8, int lane) :
        a(row + 4 * (lane % 4)),
        b(row8 + 4 * (lane % 4)),
        scales_a(row + 192),
        scales_b(row8 + 192),
        d_a(0.25f * __half2float(*(const half *) (row + 208))),
        d_b(0.25f * __half2float(*(const half *) (row8 + 208))) {}
    static __device__ __forceinline__ uint32_t word(const words_at<place> & of, int side, int i, int half) {
        const uint32_t four = of.word(64 * side + i % 2 * 32 + 16 * half);
        const uint32_t two  = of.word(128 + 32 * side + 16 * half);
        const uint32_t less = ptx::and_xor(i < 2 ? four << 2 : four >> 2, 0x3c3c3c3c, 0x80808080); // by 32
        return ptx::and_xor(two << (6 - 2 * i), 0xc0c0c0c0, less);
    }
    __device__ __forceinline__ words_of_a words(int block) const {
        const int side = block / 4, i = block % 4;
        return { { word(a, side, i, 0), word(b, side, i, 0), word(a, side, i, 1), word(b, side, i, 1) } };
    }
    // 32 bytes as they lie: planes.cuh
    __device__ __forceinline__ words_of_a bytes(int distance, int lane) const {
        return { { a.word_of_16(distance, lane), b.word_of_16(distance, lane), a.word_of_16(distance + 16, lane),
                   b.word_of_16(distance + 16, lane) } };
    }
    __device__ __forceinline__ float2      scale(int) const { return make_float2(d_a, d_b); }
    static __device__ __forceinline__ int2 halves(const char * scales, int block) {
        const int two = *(const int16_t *) (scales + 2 * block);
        return make_int2((int8_t) two, two >> 8);
    }
    __device__ __forceinline__ int4 halves(int block) const {
        const int2 x = halves(scales_a, block), y = halves(scales_b, block);
        return make_int4(x.x, x.y, y.x, y.y);
    }
};

template <> struct unpacked<GGML_TYPE_Q6_K> : tile_of_Q6_K<place_of_rows::any> {
    using tile_of_Q6_K::tile_of_Q6_K;
};

} // namespace dw::layer_parts
