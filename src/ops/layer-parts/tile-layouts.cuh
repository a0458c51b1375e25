// How tiles of each type of weights lie in memory, and in the slots of shared memory that pieces.cuh copies them into.
// Test: tests/ops/test_cuda_layers.py, tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/byte-tiles.cuh"
#include "ops/layer-parts/tiles.cuh"

namespace dw::layer_parts {

// How a type's tiles lie in memory and in a slot:
//   block, block_bytes  values and bytes of a block
//   n_at_once           tiles of a piece
//   pitch               bytes from row to row of a slot, which lets the lanes of one load meet different banks
//   is_aligned          each row's blocks begin at multiples of 16 bytes, as copies do
struct layout_of_blocks {
    int  block, block_bytes, n_at_once, pitch;
    bool is_aligned;
};

template <ggml_type type> constexpr layout_of_blocks layout_of() {
    switch (type) {
        case GGML_TYPE_Q4_K:
            return { QK_K, sizeof(block_q4_K), 2, 288, true };
        case GGML_TYPE_Q5_K:
            return { QK_K, sizeof(block_q5_K), 2, 352, true };
        case GGML_TYPE_Q6_K:
            return { QK_K, sizeof(block_q6_K), 1, 240, false };
        case GGML_TYPE_Q8_0:
            return { QK8_0, sizeof(block_q8_0), 1, 304, false };
        default:
            return { QK_K, sizeof(block_iq4_xs), 2, 304, false };
    }
}

template <ggml_type type> struct tiled {
    static constexpr layout_of_blocks of          = layout_of<type>();
    static constexpr int              pitch       = of.pitch;
    static constexpr int              n_values    = of.n_at_once * tile_values; // of a row of a piece
    static constexpr int              slot_bytes  = tile_rows * of.pitch;
    static constexpr int              block_bytes = of.block_bytes;
    static constexpr bool             is_whole    = n_values == of.block; // a piece is one block of a row

    // where rows lie when they are multiplied: in their slot
    static constexpr bool is_made = false;
    static constexpr int  read_at = 0, read_pitch = pitch, made_bytes = 0;

    // n: values of a row, whole blocks
    static __device__ __forceinline__ int bytes(int n) { return n / of.block * of.block_bytes; }
    // what lies before a row in its slot
    static __device__ __forceinline__ int offset(const char * row) {
        return of.is_aligned ? 0 : (int) ((uintptr_t) row % 16);
    }
    static __device__ __forceinline__ int read_offset(const char * row) { return offset(row); }
};

// A tile of any byte-tiled type as it lies. Before it is multiplied it becomes bytes, at a place that all slots of its
// warp share, in front of them.
template <> struct tiled<byte_tiles> {
    static constexpr int  pitch = 176, n_values = tile_values, slot_bytes = tile_rows * pitch;
    static constexpr bool is_whole    = false;
    static constexpr int  block_bytes = 0;
    static constexpr bool is_made     = true;
    static constexpr int  read_pitch = byte_row::pitch, made_bytes = tile_rows * read_pitch, read_at = -made_bytes;
    static_assert(pitch >= 15 + most_tile_bytes + 4, "an offset, the largest tile, and the word behind its last one");

    static __device__ __forceinline__ int bytes(int) { return 0; } // a piece has one tile
    static __device__ __forceinline__ int offset(const char * row) { return (int) ((uintptr_t) row % 16); }
    static __device__ __forceinline__ int read_offset(const char *) { return 0; }
};

} // namespace dw::layer_parts
