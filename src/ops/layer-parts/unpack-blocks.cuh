// Blocks of 32 values with one scale: Q8_0 and IQ4_XS. See unpack-words.cuh.
// Test: tests/ops/test_cuda_layers.py, tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/unpack-words.cuh"

namespace dw::layer_parts {

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
    static __device__ __forceinline__ uint2 values(const int8_t * x, int lane) { return of_both_halves(x, lane); }
};

// may_be_cut: a row may end in the tile. Where none does, loads of all blocks are made ahead.
template <bool may_be_cut> struct tile_of_Q8_0 : in_blocks_of_32 {
    static constexpr bool is_signed = true, has_least = false, is_cut = may_be_cut;
    const char *          a, *b;
    int                   at;

    __device__ __forceinline__ tile_of_Q8_0(const char * row, const char * row8, int lane) :
        a(row),
        b(row8),
        at(2 + 4 * (lane % 4)) {}
    __device__ __forceinline__ words_of_a words(int i) const {
        const words_from x(a + i * sizeof(block_q8_0) + at), y(b + i * sizeof(block_q8_0) + at);
        return { { x.word(0), y.word(0), x.word(16), y.word(16) } };
    }
    static __device__ __forceinline__ float scale(const char * row, int i) {
        return __half2float(*(const half *) (row + i * sizeof(block_q8_0)));
    }
    __device__ __forceinline__ float2       scale(int i) const { return make_float2(scale(a, i), scale(b, i)); }
    static __device__ __forceinline__ uint2 values(const int8_t * x, int lane) { return of_both_halves(x, lane); }
};

template <> struct unpacked<GGML_TYPE_Q8_0> : tile_of_Q8_0<true> {
    using tile_of_Q8_0::tile_of_Q8_0;
};

template <> struct whole_tile<GGML_TYPE_Q8_0> : tile_of_Q8_0<false> {
    using tile_of_Q8_0::tile_of_Q8_0;
};

} // namespace dw::layer_parts
