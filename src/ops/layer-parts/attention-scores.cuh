// Scores of an attention tile's pairs with a chunk of cells: keys in registers times queries in shared memory
// (attention-tile.cuh). Test: tests/ops/layer_kernels.py.

#pragma once

#include "ops/door/ptx.cuh"
#include "ops/layer-parts/attention-block.cuh"

namespace dw::layer_parts {

template <ggml_type type, int size, int n_sets> class attention_scores {
    static constexpr int n_eights = chunk / (8 * warps_of_a_tile<size>); // eight cells whose scores a warp computes
    static constexpr int n_chains = 2 / n_eights; // sums of a score, so that two are on their way
    static constexpr int n_steps  = size / 32;    // of 32 values of a key

  public:
    __device__ __forceinline__ explicit attention_scores(block_memory<size, n_sets> & memory) :
        memory_(memory),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32) {}

    // row_of: where keys of a place of the chunk are. Of each eight cells a lane has one.
    template <class Rows> __device__ __forceinline__ void load(const Rows & row_of) {
#pragma unroll
        for (int eight = 0; eight < n_eights; ++eight) {
            const char * key = row_of(8 * (n_eights * warp_ + eight) + lane_ / 4);
#pragma unroll
            for (int step = 0; step < n_steps; ++step) {
                keys_[eight][step].load(key, 32 * step + lane_ % 4 * 8);
            }
        }
    }

    // Scores of the pairs with the warp's places; of one row's pairs, or of all (-1).
    __device__ __forceinline__ void multiply(int row) const {
#pragma unroll
        for (int set = 0; set < n_sets; ++set) {
            const int low                      = pairs_of_a_set * set + lane_ / 4; // and low + 8
            float     d[n_eights][n_chains][4] = {};
#pragma unroll
            for (int step = 0; step < n_steps; ++step) {
                packed_halves<8> a, b;
                a.load(&memory_.queries[low][lane_ % 4 * 8 + 32 * step]);
                b.load(&memory_.queries[low + 8][lane_ % 4 * 8 + 32 * step]);
                const uint32_t first[]  = { a.words[0], b.words[0], a.words[1], b.words[1] };
                const uint32_t second[] = { a.words[2], b.words[2], a.words[3], b.words[3] };
#pragma unroll
                for (int eight = 0; eight < n_eights; ++eight) {
                    const auto & key = keys_[eight][step];
                    ptx::multiply_16_bits(d[eight][0], first, make_uint2(key.two(0), key.two(1)));
                    ptx::multiply_16_bits(d[eight][n_chains - 1], second, make_uint2(key.two(2), key.two(3)));
                }
            }
            store_scores(d, low, row);
        }
    }

  private:
    // of pairs low and low + 8
    __device__ __forceinline__ void store_scores(const float (&d)[n_eights][n_chains][4], int low, int row) const {
#pragma unroll
        for (int i = 0; i < 2 * n_eights; ++i) {
            const int     pair = low + i % 2 * 8, eight = i / 2;
            const float * sums = &d[eight][0][i % 2 * 2];
            float2        two  = make_float2(sums[0], sums[1]);
            if constexpr (n_chains == 2) {
                const float * others = &d[eight][1][i % 2 * 2];
                two                  = make_float2(two.x + others[0], two.y + others[1]);
            }
            if (row < 0 || memory_.row_of(pair) == row) {
                *(float2 *) &memory_.scores[pair][8 * (n_eights * warp_ + eight) + lane_ % 4 * 2] = two;
            }
        }
    }

    block_memory<size, n_sets> & memory_;
    int                          warp_, lane_;
    cached_values<type, 8>       keys_[n_eights][n_steps]; // of the chunk that is computed, or the one behind it
};

} // namespace dw::layer_parts
