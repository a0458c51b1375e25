// How tensor cores see blocks of quantised weights: the operands, scales and least values of a tile, 16 rows of 256
// values, for one lane. Test: tests/gpu/test_layer_parts_cuda.py.
//
// unpacked<type> of a tile has two rows, lane / 4 and lane / 4 + 8, at addresses in shared memory:
//   n_steps      sub-blocks of a row: 8 of 32 values, or 16 of 16
//   words(i)     of step i: the operand A, in an order of values that suits the type
//   values(x, i, lane)  the operand B in that order, of block block_of(i) of a column at x
//   scale(i), least(i)  of both rows
//   class_of(i)  which sums step i belongs to: tiles.cuh
//   is_cut       a row may end with any block of 32

#pragma once

#include "ops/layer-parts/rows.cuh"
#include "vecdotq.cuh"

namespace dw::layer_parts {

// A of a step of 32 values: rows lane / 4, lane / 4 + 8, and these of its second half.
struct words_of_a {
    uint32_t at[4];
};

// four bytes from an address that is a multiple of 2
__device__ __forceinline__ uint32_t word_at(const char * at, bool is_odd) {
    const uint32_t * low = (const uint32_t *) (at - (is_odd ? 2 : 0));
    return is_odd ? __byte_perm(low[0], low[1], 0x5432) : low[0];
}

__device__ __forceinline__ bool is_odd(const char * at) {
    return (uintptr_t) at % 4 != 0;
}

// byte i of w times d, exact; less = -d * 2^23
__device__ __forceinline__ float times_byte(uint32_t w, int i, float d, float less) {
    return fmaf(d, __uint_as_float(__byte_perm(w, 0x4B000000, 0x7650 + i)), less);
}

// 8 or 4 values a lane of a block of 32
__device__ __forceinline__ uint2 side_by_side(const int8_t * x, int lane) {
    return *(const uint2 *) (x + lane % 4 * 8);
}

__device__ __forceinline__ uint2 of_both_halves(const int8_t * x, int lane) {
    const uint32_t * at = (const uint32_t *) x + lane % 4;
    return make_uint2(at[0], at[4]);
}

template <ggml_type type> struct unpacked;

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

// What types with steps of 32 values have in common.
struct in_blocks_of_32 {
    static constexpr int                  n_steps = 8;
    static __device__ __forceinline__ int block_of(int step) { return step; }
    static __device__ __forceinline__ int class_of(int step) { return step / 2; }
};

template <> struct unpacked<GGML_TYPE_Q4_K> : in_blocks_of_32 {
    static constexpr bool is_signed = false, has_least = true, is_cut = false;
    const char *          a, *b;
    scales_of_K           of_a, of_b;

    __device__ __forceinline__ unpacked(const char * row, const char * row8, int lane) :
        a(row + 16 + 8 * (lane % 4)),
        b(row8 + 16 + 8 * (lane % 4)),
        of_a(row),
        of_b(row8) {}
    // high nibbles count 16 times
    __device__ __forceinline__ words_of_a words(int i) const {
        const uint2    x = *(const uint2 *) (a + 32 * (i / 2)), y = *(const uint2 *) (b + 32 * (i / 2));
        const uint32_t mask = i % 2 ? 0xf0f0f0f0 : 0x0f0f0f0f;
        return { { x.x & mask, y.x & mask, x.y & mask, y.y & mask } };
    }
    __device__ __forceinline__ float2 scale(int i) const {
        const float by = i % 2 ? 0.0625f : 1.0f;
        return make_float2(by * of_a.scale(i), by * of_b.scale(i));
    }
    __device__ __forceinline__ float2 least(int i) const {
        return make_float2(of_a.least_value(i), of_b.least_value(i));
    }
    static __device__ __forceinline__ uint2 values(const int8_t * x, int, int lane) { return side_by_side(x, lane); }
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
    static __device__ __forceinline__ uint2 values(const int8_t * x, int, int lane) { return side_by_side(x, lane); }
};

template <> struct unpacked<GGML_TYPE_IQ4_XS> : in_blocks_of_32 {
    static constexpr bool is_signed = true, has_least = false, is_cut = false;
    const char *          a, *b;
    int                   at; // of this lane's word

    __device__ __forceinline__ unpacked(const char * row, const char * row8, int lane) :
        a(row),
        b(row8),
        at(8 + 4 * (lane % 4)) {}
    __device__ __forceinline__ words_of_a words(int i) const {
        const int2 x = get_int_from_table_16(*(const int *) (a + at + 16 * i), kvalues_iq4nl);
        const int2 y = get_int_from_table_16(*(const int *) (b + at + 16 * i), kvalues_iq4nl);
        return { { (uint32_t) x.x, (uint32_t) y.x, (uint32_t) x.y, (uint32_t) y.y } };
    }
    static __device__ __forceinline__ float scale(const char * block, int i) {
        const uint2 head = *(const uint2 *) block; // d, high bits of scales; low bits
        const int   low = head.y >> (4 * i) & 0x0f, high = head.x >> (16 + 2 * i) & 0x03;
        return __half2float(__ushort_as_half((unsigned short) head.x)) * (float) ((low | high << 4) - 32);
    }
    __device__ __forceinline__ float2       scale(int i) const { return make_float2(scale(a, i), scale(b, i)); }
    static __device__ __forceinline__ uint2 values(const int8_t * x, int, int lane) { return of_both_halves(x, lane); }
};

template <> struct unpacked<GGML_TYPE_Q8_0> : in_blocks_of_32 {
    static constexpr bool is_signed = true, has_least = false, is_cut = true;
    const char *          a, *b;
    int                   at;

    __device__ __forceinline__ unpacked(const char * row, const char * row8, int lane) :
        a(row),
        b(row8),
        at(2 + 4 * (lane % 4)) {}
    __device__ __forceinline__ words_of_a words(int i) const {
        const char *x = a + i * sizeof(block_q8_0) + at, *y = b + i * sizeof(block_q8_0) + at;
        const bool  odd_x = is_odd(x), odd_y = is_odd(y);
        return { { word_at(x, odd_x), word_at(y, odd_y), word_at(x + 16, odd_x), word_at(y + 16, odd_y) } };
    }
    static __device__ __forceinline__ float scale(const char * row, int i) {
        return __half2float(*(const half *) (row + i * sizeof(block_q8_0)));
    }
    __device__ __forceinline__ float2       scale(int i) const { return make_float2(scale(a, i), scale(b, i)); }
    static __device__ __forceinline__ uint2 values(const int8_t * x, int, int lane) { return of_both_halves(x, lane); }
};

// Step 8 s + 2 i + h: half h of block 4 s + i. As operands values less 32 count 4 times.
template <> struct unpacked<GGML_TYPE_Q6_K> {
    static constexpr int  n_steps   = 16;
    static constexpr bool is_signed = true, has_least = false, is_cut = false;
    const char *          a, *b;
    bool                  odd_a, odd_b;
    float                 d_a, d_b;
    int                   at;

    __device__ __forceinline__ unpacked(const char * row, const char * row8, int lane) :
        a(row),
        b(row8),
        odd_a(is_odd(row)),
        odd_b(is_odd(row8)),
        d_a(0.25f * __half2float(*(const half *) (row + 208))),
        d_b(0.25f * __half2float(*(const half *) (row8 + 208))),
        at(4 * (lane % 4)) {}
    static __device__ __forceinline__ int      block_of(int step) { return step / 2; }
    static __device__ __forceinline__ int      class_of(int step) { return step % 8 / 2; }
    static __device__ __forceinline__ uint32_t word(const char * row, bool odd, int side, int i, int within) {
        const uint32_t four = word_at(row + 64 * side + i % 2 * 32 + within, odd);
        const uint32_t two  = word_at(row + 128 + 32 * side + within, odd);
        return (((i < 2 ? four << 2 : four >> 2) & 0x3c3c3c3c) | (two << (6 - 2 * i) & 0xc0c0c0c0)) ^ 0x80808080;
    }
    __device__ __forceinline__ uint2 words(int step) const {
        const int side = step / 8, i = step % 8 / 2, within = step % 2 * 16 + at;
        return make_uint2(word(a, odd_a, side, i, within), word(b, odd_b, side, i, within));
    }
    __device__ __forceinline__ float2 scale(int step) const {
        return make_float2(d_a * (float) *(const int8_t *) (a + 192 + step),
                           d_b * (float) *(const int8_t *) (b + 192 + step));
    }
    static __device__ __forceinline__ uint32_t values(const int8_t * x, int step, int lane) {
        return *(const uint32_t *) (x + step % 2 * 16 + lane % 4 * 4);
    }
};

} // namespace dw::layer_parts
