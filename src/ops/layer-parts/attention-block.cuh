// What blocks of attention are given and what each keeps in shared memory: attention-tile.cuh. Must not know: what is
// computed of it. Test: tests/ops/layer_kernels.py.

#pragma once

#include "ops/layer-parts/cached-values.cuh"
#include "ops/layer-parts/draft-paths.cuh"

namespace dw::layer_parts {

constexpr int pairs_of_a_set = 16, chunk = cells_of_a_chunk;

// Registers hold a chunk's keys and values: enough of them for two blocks a multiprocessor.
template <int size> constexpr int warps_of_a_tile = size == 256 ? 8 : 4;

struct attention_arguments {
    const char *    q;
    int64_t         q_row, q_head, q_stream;  // bytes
    strided_rows    k, v, mask;               // mask: F16, a row of it for each row
    bool            masks_are_aligned;        // rows of masks begin at multiples of 8 bytes
    const int32_t * tree;                     // nullptr: rows see cells where they are
    int             tree_rows;                // M of tree
    int      n_rows, n_cells, n_heads, group; // rows of a stream; heads of queries, and of them to a head of keys
    float    scale;
    bool     is_transformed; // the result is: hadamard.h, 64 values at a time
    float2 * ends;           // [streams][parts][pairs]: greatest score, sum of weights
    float *  sums;           // [streams][parts][pairs][size]
    float *  out;            // [streams][rows][heads][size]

    __host__ __device__ __forceinline__ int n_pairs() const { return n_rows * n_heads; }
};

// Which bit of block_memory::seen stands for a place of a chunk. Byte b, written by lane b of a pair: bits 0 to 3 are
// places 4 b to 4 b + 3, bits 4 to 7 are places 4 b + 32 to 4 b + 35.
__host__ __device__ __forceinline__ constexpr int bit_of(int place) {
    return place % 32 / 4 * 8 + place / 32 * 4 + place % 4;
}

// What a block keeps in shared memory.
template <int size, int n_sets> struct block_memory {
    static constexpr int n_pairs = n_sets * pairs_of_a_set;

    // Gaps let lanes meet different banks.
    __align__(16) half queries[n_pairs][size + 32];
    __align__(16) float scores[n_pairs][chunk + 8];
    __align__(16) half weights[n_pairs][chunk + 8];
    float factor[n_pairs];               // of the sums of the chunks before
    int   rows[n_pairs], heads[n_pairs]; // row -1: no such pair

    int first_row, n_of_rows; // of the tile
    int n_chunks;             // of the part, to the last one that masks let a row see

    // by row of the tile
    uint64_t             seen[n_pairs]; // a bit for each place of the chunk: bit_of
    draft_paths<n_pairs> paths;

    // of a chunk that is read row by row: cells that are read, and by row a bit for each place that paths show or hide
    int      sources[chunk];
    uint32_t shown[n_pairs][chunk / 32], hidden[n_pairs][chunk / 32];

    // of a pair, counted from the tile's first
    __device__ __forceinline__ int row_of(int pair) const { return rows[pair] - first_row; }

    // where a pair's results are, of those of a stream
    __device__ __forceinline__ int out_pair(int pair, int n_heads) const { return rows[pair] * n_heads + heads[pair]; }
};

} // namespace dw::layer_parts
