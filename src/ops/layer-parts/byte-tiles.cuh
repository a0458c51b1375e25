// Tiles that become bytes in shared memory before they are multiplied: one code for all types of small-blocks.cuh, at
// the cost of a second trip through shared memory. Kernels that have it are instances of their own (with_type).
// Test: tests/ops/test_cuda_layers.py, tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/dots.cuh"
#include "ops/layer-parts/small-blocks.cuh"

namespace dw::layer_parts {

static_assert(tile_values == byte_tile);
constexpr int most_tile_bytes = 144; // of a row as it lies

// A row of a tile of bytes: 256 values, a scale of each block, and two bytes of each by which halves are multiplied.
struct byte_row {
    static constexpr int scales_at = tile_values, halves_at = scales_at + blocks_of_tile * sizeof(float);
    static constexpr int pitch = halves_at + blocks_of_tile * 2;
    static_assert(pitch == 304, "19 times 16: lanes of one load meet different banks");
};

template <> struct unpacked<byte_tiles> : in_halves_of_blocks {
    const char *a, *b;
    int         at; // of this lane's words

    __device__ __forceinline__ unpacked(const char * row, const char * row8, int lane) :
        a(row),
        b(row8),
        at(4 * (lane % 4)) {}
    __device__ __forceinline__ words_of_a words(int i) const {
        const uint32_t *x = (const uint32_t *) (a + at + 32 * i), *y = (const uint32_t *) (b + at + 32 * i);
        return { { x[0], y[0], x[4], y[4] } };
    }
    static __device__ __forceinline__ float scale(const char * row, int i) {
        return ((const float *) (row + byte_row::scales_at))[i];
    }
    __device__ __forceinline__ float2 scale(int i) const { return make_float2(scale(a, i), scale(b, i)); }
    __device__ __forceinline__ int4   halves(int i) const {
        const int x = ((const int16_t *) (a + byte_row::halves_at))[i];
        const int y = ((const int16_t *) (b + byte_row::halves_at))[i];
        return make_int4((int8_t) x, x >> 8, (int8_t) y, y >> 8);
    }
};

// every second block of a row
template <ggml_type type> __device__ __forceinline__ void make_bytes_of(const char * row, char * to, int first) {
    using of = block_of<type>;
    static_assert(of::tile_bytes <= most_tile_bytes);
#pragma unroll 1
    for (int i = first; i < blocks_of_tile; i += 2) {
        uint32_t w[words_of_block];
        of::words(row, i, w);
        uint4 * values                               = (uint4 *) (to + 32 * i);
        values[0]                                    = make_uint4(w[0], w[1], w[2], w[3]);
        values[1]                                    = make_uint4(w[4], w[5], w[6], w[7]);
        ((float *) (to + byte_row::scales_at))[i]    = of::scale(row, i);
        ((uint16_t *) (to + byte_row::halves_at))[i] = (uint16_t) of::halves(row, i);
    }
}

// call(type_of<type>{}) for a type of is_byte_tiled()
template <typename call_type> __device__ __forceinline__ void with_byte_tiled_type(ggml_type type, call_type && call) {
    switch (type) {
        case GGML_TYPE_Q4_0:
            return call(type_of<GGML_TYPE_Q4_0>{});
        case GGML_TYPE_IQ4_NL:
            return call(type_of<GGML_TYPE_IQ4_NL>{});
        case GGML_TYPE_MXFP4:
            return call(type_of<GGML_TYPE_MXFP4>{});
        case GGML_TYPE_Q3_K:
            return call(type_of<GGML_TYPE_Q3_K>{});
        case GGML_TYPE_IQ3_XXS:
            return call(type_of<GGML_TYPE_IQ3_XXS>{});
        case GGML_TYPE_IQ3_S:
            return call(type_of<GGML_TYPE_IQ3_S>{});
        case GGML_TYPE_IQ2_S:
            return call(type_of<GGML_TYPE_IQ2_S>{});
        case GGML_TYPE_IQ2_XS:
            return call(type_of<GGML_TYPE_IQ2_XS>{});
        case GGML_TYPE_IQ2_XXS:
            return call(type_of<GGML_TYPE_IQ2_XXS>{});
        default:
            return;
    }
}

// make_bytes_of for any of them: a function of its own, so that kernels have this code once.
static __noinline__ __device__ void make_bytes(ggml_type type, const char * row, char * to, int first) {
    with_byte_tiled_type(type, [&](auto type_is) { make_bytes_of<decltype(type_is)::value>(row, to, first); });
}

// bytes of a tile's row of any of them
__device__ __forceinline__ int bytes_of_small_tile(ggml_type type) {
    int n = 0;
    with_byte_tiled_type(type, [&](auto type_is) { n = block_of<decltype(type_is)::value>::tile_bytes; });
    return n;
}

} // namespace dw::layer_parts
