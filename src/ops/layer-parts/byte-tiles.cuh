// Tiles that become bytes in shared memory before they are multiplied: one code for all types of small-blocks.cuh and
// grid-blocks.cuh, at the cost of a second trip through shared memory. Kernels that have it are instances of their own
// (with_type), and load the grids of their types first. Test: tests/ops/test_cuda_layers.py,
// tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/dots.cuh"
#include "ops/layer-parts/grid-blocks.cuh"

#include <algorithm>
#include <utility>

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

// half a row: blocks 4 * side to 4 * side + 3
template <ggml_type type> __device__ __forceinline__ void
make_bytes_of(const char * __restrict__ row, char * __restrict__ to, int side, const char * __restrict__ grid) {
    static_assert(half_row_of<type>::tile_bytes <= most_tile_bytes);
    const half_row_of<type> from(row, side, grid);
    constexpr int           n      = blocks_of_half_row;
    uint4 * const           values = (uint4 *) (to + side * n * 32);
#pragma unroll
    for (int k = 0; k < n; ++k) {
        uint32_t w[words_of_block];
        from.words(k, w);
        values[2 * k]     = make_uint4(w[0], w[1], w[2], w[3]);
        values[2 * k + 1] = make_uint4(w[4], w[5], w[6], w[7]);
    }
    ((float4 *) (to + byte_row::scales_at))[side] =
        make_float4(from.scale(0), from.scale(1), from.scale(2), from.scale(3));
    ((uint2 *) (to + byte_row::halves_at))[side] = from.halves();
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

// ---- grids of a block of threads, in its dynamic shared memory ----

template <ggml_type type> __host__ __device__ constexpr int number_of() {
    constexpr auto find = [] {
        int number = 0;
        while (byte_tiled_types[number] != type) {
            ++number;
        }
        return number;
    };
    return std::integral_constant<int, find()>::value;
}

// [number_of<type>()]: where a type's grid is in that memory
__device__ __forceinline__ int * places_of_grids() {
    __shared__ int places[sizeof(byte_tiled_types) / sizeof(ggml_type)];
    return places;
}

// Host: 0 for a type without a grid
constexpr int bytes_of_grid(ggml_type type) {
    switch (type) {
        case GGML_TYPE_IQ3_XXS:
            return grid_of<GGML_TYPE_IQ3_XXS>::bytes;
        case GGML_TYPE_IQ3_S:
            return grid_of<GGML_TYPE_IQ3_S>::bytes;
        case GGML_TYPE_IQ2_S:
            return grid_of<GGML_TYPE_IQ2_S>::bytes;
        case GGML_TYPE_IQ2_XS:
            return grid_of<GGML_TYPE_IQ2_XS>::bytes;
        case GGML_TYPE_IQ2_XXS:
            return grid_of<GGML_TYPE_IQ2_XXS>::bytes;
        default:
            return 0;
    }
}

template <size_t... i> constexpr bool has_bytes_of_all_grids(std::index_sequence<i...>) {
    return ((bytes_of_grid(byte_tiled_types[i]) == grid_of<byte_tiled_types[i]>::bytes) && ...);
}
static_assert(has_bytes_of_all_grids(std::make_index_sequence<sizeof(byte_tiled_types) / sizeof(ggml_type)>{}));

// Host: bytes of the grids of these types, a multiple of 16.
inline int bytes_of_grids(const ggml_type * types, int n_types) {
    int bytes = 0;
    for (int i = 0; i < n_types; ++i) {
        const bool first = std::find(types, types + i, types[i]) == types + i;
        bytes += first ? bytes_of_grid(types[i]) : 0;
    }
    return bytes;
}

// All threads of a block: copies the grids of these types into its dynamic shared memory, from `at` on.
template <typename type_at_type>
__device__ __forceinline__ void load_grids(char * memory, int at, int n_types, type_at_type && type_at) {
    int seen = 0;
    for (int i = 0; i < n_types; ++i) {
        with_byte_tiled_type(type_at(i), [&](auto type_is) {
            using grid           = grid_of<decltype(type_is)::value>;
            constexpr int number = number_of<decltype(type_is)::value>();
            if constexpr (grid::bytes > 0) {
                if (!(seen >> number & 1)) {
                    uint32_t * const to = (uint32_t *) (memory + at);
                    if (threadIdx.x == 0) {
                        places_of_grids()[number] = at;
                    }
                    for (int j = threadIdx.x; j < grid::bytes / (int) sizeof(uint32_t); j += blockDim.x) {
                        to[j] = ((const uint32_t *) grid::all())[j];
                    }
                    at += grid::bytes;
                    seen |= 1 << number;
                }
            }
        });
    }
    if (seen != 0) {
        __syncthreads();
    }
}

// make_bytes_of for any of them: a function of its own, so that kernels have this code once.
static __noinline__ __device__ void make_bytes(ggml_type type, const char * __restrict__ row, char * __restrict__ to,
                                               int       side) {
    extern __shared__ __align__(128) char memory[];
    with_byte_tiled_type(type, [&](auto type_is) {
        constexpr ggml_type type = decltype(type_is)::value;
        const char *        grid = memory;
        if constexpr (grid_of<type>::bytes > 0) {
            grid += places_of_grids()[number_of<type>()];
        }
        make_bytes_of<type>(row, to, side, grid);
    });
}

// bytes of a tile's row of any of them
__device__ __forceinline__ int bytes_of_small_tile(ggml_type type) {
    int n = 0;
    with_byte_tiled_type(type, [&](auto type_is) { n = half_row_of<decltype(type_is)::value>::tile_bytes; });
    return n;
}

} // namespace dw::layer_parts
