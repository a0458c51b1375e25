// How tensor cores see blocks of quantised weights: the operands, scales and least values of a tile, 16 rows of 256
// values, for one lane. Test: tests/gpu/test_layer_parts_cuda.py.
//
// unpacked<type> of a tile has two rows, lane / 4 and lane / 4 + 8, at addresses in shared memory, and 8 blocks of
// each:
//   words(i)     of block i: the operand A, in an order of values that suits the type
//   values(x, lane)  the operand B in that order, of a column's block at x
//   scale(i), least(i)  of both rows
//   halves(i)    has_halves: of both rows, whole numbers that the dots of a block's halves count
//   bytes(distance, lane)  has_planes: bytes of both rows, which have several values each
//   nibbles(i)   has_nibbles: bytes whose lower halves are block 2 i, and whose upper ones block 2 i + 1
//   class_of(i)  which sums block i belongs to: tiles.cuh
//   is_cut       a row may end with any block

#pragma once

#include "ops/layer-parts/rows.cuh"
#include "vecdotq.cuh"

namespace dw::layer_parts {

constexpr int tile_rows = 16, tile_values = 256, blocks_of_tile = 8, n_classes = 4;

// A of a block of 32 values: rows lane / 4, lane / 4 + 8, and these of its second half.
struct words_of_a {
    uint32_t at[4];

    __device__ __forceinline__ words_of_a masked(uint32_t mask) const {
        return { { at[0] & mask, at[1] & mask, at[2] & mask, at[3] & mask } };
    }
};

// Words of shared memory from an address that is a multiple of 2. They are read with the word behind them.
class words_from {
  public:
    __device__ __forceinline__ explicit words_from(const char * at) :
        words_from(at, (uintptr_t) at & 2, (uintptr_t) at & 2 ? 0x5432 : 0x3210) {}
    // the word at a distance in bytes, a multiple of 4
    __device__ __forceinline__ uint32_t word(int distance) const {
        const uint32_t * of = at_ + distance / 4;
        return __byte_perm(of[0], of[1], pick_);
    }

  protected:
    // odd: bytes from a multiple of 4 to `at`
    __device__ __forceinline__ words_from(const char * at, uintptr_t odd, uint32_t pick) :
        at_((const uint32_t *) (at - odd)),
        pick_(pick) {}

  private:
    const uint32_t * at_;
    uint32_t         pick_;
};

// The same from any address.
struct words_from_any : words_from {
    __device__ __forceinline__ explicit words_from_any(const char * at) :
        words_from(at, (uintptr_t) at & 3, 0x3210 + 0x1111 * (uint32_t) ((uintptr_t) at & 3)) {}
};

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

// What types whose blocks of 32 values have one scale have in common.
struct in_blocks_of_32 {
    static constexpr bool                 has_halves = false, has_planes = false, is_rotated = false;
    static constexpr bool                 has_nibbles = false;
    static __device__ __forceinline__ int class_of(int block) { return block / 2; }
};

// What types have in common whose halves of a block have a scale each. Their operands have a word of either half.
struct in_halves_of_blocks {
    static constexpr bool                   is_signed = true, has_least = false, is_cut = false, has_halves = true;
    static constexpr bool                   has_planes = false, is_rotated = false, has_nibbles = false;
    static __device__ __forceinline__ int   class_of(int block) { return block % 4; }
    static __device__ __forceinline__ uint2 values(const int8_t * x, int lane) { return of_both_halves(x, lane); }
};

// a tile that no row ends in
template <ggml_type type> struct whole_tile : unpacked<type> {
    using unpacked<type>::unpacked;
};

} // namespace dw::layer_parts
