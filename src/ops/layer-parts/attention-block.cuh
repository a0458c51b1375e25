// What blocks of attention are given and what each keeps in shared memory: attention-tile.cuh. Must not know: what is
// computed of it. Test: tests/ops/layer_kernels.py.

#pragma once

#include "ops/door/launch.h"
#include "ops/layer-parts/draft-paths.cuh"

namespace dw::layer_parts {

constexpr int pairs_of_a_set = 16, chunk = cells_of_a_chunk;

// Registers hold a chunk's keys and values: enough of them for two blocks a multiprocessor.
template <int size> constexpr int warps_of_a_tile = size == 256 ? 8 : 4;

// This lane's neighbours in a row of `per_lane` values of 16 bits.
template <int per_lane> union neighbours {
    uint32_t words[(per_lane + 1) / 2];
    uint4    four;
    uint2    two;

    __device__ __forceinline__ void load(const half * at) {
        if constexpr (per_lane == 8) {
            four = *(const uint4 *) at;
        } else if constexpr (per_lane == 4) {
            two = *(const uint2 *) at;
        } else {
            words[0] = *(const uint32_t *) at;
        }
    }
};

// F16, strides in bytes
struct half_rows {
    const char * data;
    int64_t      head, stream;
    int          cell; // of few bits, so that an address takes one instruction

    static half_rows from(const ggml_tensor * t) {
        return { dw::data_of<const char>(t), (int64_t) t->nb[2], (int64_t) t->nb[3], (int) t->nb[1] };
    }
    __device__ __forceinline__ half_rows of(int h, int s) const {
        return { data + h * head + s * stream, head, stream, cell };
    }
    __device__ __forceinline__ const half * at(int c) const { return (const half *) (data + (int64_t) c * cell); }
};

struct attention_arguments {
    const char *    q;
    int64_t         q_row, q_head, q_stream;  // bytes
    half_rows       k, v, mask;               // mask: a cell is a row
    bool            masks_are_aligned;        // rows of masks begin at multiples of 8 bytes
    const int32_t * tree;                     // nullptr: rows see cells where they are
    int             tree_rows;                // M of tree
    int      n_rows, n_cells, n_heads, group; // rows of a stream; heads of queries, and of them to a head of keys
    float    scale;
    float2 * ends; // [streams][parts][pairs]: greatest score, sum of weights
    float *  sums; // [streams][parts][pairs][size]
    float *  out;  // [streams][rows][heads][size]

    __host__ __device__ __forceinline__ int n_pairs() const { return n_rows * n_heads; }
};

// Which bit of block_memory::seen stands for a place of a chunk: a byte has four neighbours and the four 32 behind
// them.
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
