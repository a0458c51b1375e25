// Weighted sums of an attention tile's values: weights in shared memory times a chunk's values in registers
// (attention-tile.cuh). Test: tests/ops/layer_kernels.py.

#pragma once

#include "ops/door/ptx.cuh"
#include "ops/layer-parts/attention-block.cuh"

namespace dw::layer_parts {

template <ggml_type type, int size, int n_sets> class attention_values {
    static constexpr int of_warp  = size / warps_of_a_tile<size>; // values of the result
    static constexpr int per_lane = of_warp / 8;                  // of them, neighbours
    static constexpr int n_cuts   = chunk / 16;                   // of a chunk's cells, 16 a product

  public:
    __device__ __forceinline__ explicit attention_values(block_memory<size, n_sets> & memory) :
        memory_(memory),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32) {}

    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int i = 0; i < n_sets * per_lane * 4; ++i) {
            sums_[i / (4 * per_lane)][i / 4 % per_lane][i % 4] = 0.0f;
        }
    }

    // row_of: where values of a place of the chunk are
    template <class Rows> __device__ __forceinline__ void load(const Rows & row_of) {
#pragma unroll
        for (int cut = 0; cut < n_cuts; ++cut) {
#pragma unroll
            for (int i = 0; i < 4; ++i) { // of a product: cells 2 (lane % 4) and the next, and 8 behind them
                const char * row = row_of(16 * cut + lane_ % 4 * 2 + i % 2 + i / 2 * 8);
                values_[cut][i].load(row, warp_ * of_warp + lane_ / 4 * per_lane);
            }
        }
    }

    // Sums of the chunks before, by what the newest scores make of them.
    __device__ __forceinline__ void scale() {
#pragma unroll
        for (int set = 0; set < n_sets; ++set) {
            const int   low       = pairs_of_a_set * set + lane_ / 4;
            const float factors[] = { memory_.factor[low], memory_.factor[low + 8] };
#pragma unroll
            for (int j = 0; j < per_lane; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sums_[set][j][i] *= factors[i / 2];
                }
            }
        }
    }

    // Weights times values where all rows see the same cells. What they do not see is zero in registers.
    __device__ __forceinline__ void multiply() {
        if (memory_.seen[0] != ~(uint64_t) 0) {
            const uint64_t seen = seen_by(0);
#pragma unroll
            for (int i = 0; i < n_cuts * 4; ++i) {
                values_[i / 4][i % 4].keep_if(is_seen(seen, i / 4, i % 4));
            }
        }
#pragma unroll
        for (int cut = 0; cut < n_cuts; ++cut) {
            uint32_t weights[n_sets][4];
#pragma unroll
            for (int set = 0; set < n_sets; ++set) {
                load_weights(weights[set], set, cut);
            }
#pragma unroll
            for (int j = 0; j < per_lane; ++j) {
                const uint2 values = values_of(cut, j, ~(uint64_t) 0);
#pragma unroll
                for (int set = 0; set < n_sets; ++set) {
                    ptx::multiply_16_bits(sums_[set][j], weights[set], values);
                }
            }
        }
    }

    // The same of one row's pairs. Weights of others are zero, and so is what others see, so that sums do not depend on
    // how tensor cores add zeros to other values.
    __device__ __forceinline__ void multiply_of(int row) {
#pragma unroll
        for (int set = 0; set < n_sets; ++set) {
            const int  low    = pairs_of_a_set * set + lane_ / 4;
            const bool of_low = memory_.row_of(low) == row, of_high = memory_.row_of(low + 8) == row;
            if (__ballot_sync(0xffffffff, of_low || of_high) == 0) {
                continue;
            }
            __syncwarp(); // without it the compiler keeps all operands in registers for the next set
            const uint64_t seen = seen_by(row);
            uint32_t       weights[n_cuts][4];
#pragma unroll
            for (int cut = 0; cut < n_cuts; ++cut) {
                load_weights(weights[cut], set, cut);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    weights[cut][i] = (i % 2 ? of_high : of_low) ? weights[cut][i] : 0;
                }
            }
#pragma unroll
            for (int j = 0; j < per_lane; ++j) {
                float d[] = { sums_[set][j][0], sums_[set][j][1], sums_[set][j][2], sums_[set][j][3] };
#pragma unroll
                for (int cut = 0; cut < n_cuts; ++cut) {
                    ptx::multiply_16_bits(d, weights[cut], values_of(cut, j, seen));
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sums_[set][j][i] = (i < 2 ? of_low : of_high) ? d[i] : sums_[set][j][i];
                }
            }
        }
    }

    // to f32[pairs][size], of the pairs of a stream and part
    __device__ __forceinline__ void write(float * to_pairs, int n_heads) const {
#pragma unroll
        for (int set = 0; set < n_sets; ++set) {
#pragma unroll
            for (int i = 0; i < 4; ++i) { // rows lane / 4 and lane / 4 + 8, columns 2 (lane % 4) and the next
                const int pair = pairs_of_a_set * set + lane_ / 4 + i / 2 * 8;
                if (memory_.rows[pair] >= 0) {
                    float * to = to_pairs + memory_.out_pair(pair, n_heads) * size + warp_ * of_warp +
                                 (lane_ % 4 * 2 + i % 2) * per_lane;
#pragma unroll
                    for (int j = 0; j < per_lane; j += 2) {
                        *(float2 *) (to + j) = make_float2(sums_[set][j][i], sums_[set][j + 1][i]);
                    }
                }
            }
        }
    }

  private:
    // Weights of a set's pairs for 16 cells, as a product takes them.
    __device__ __forceinline__ void load_weights(uint32_t (&to)[4], int set, int cut) const {
        const int        low = pairs_of_a_set * set + lane_ / 4, at = 16 * cut + lane_ % 4 * 2;
        const uint32_t * first  = (const uint32_t *) &memory_.weights[low][at];
        const uint32_t * second = (const uint32_t *) &memory_.weights[low + 8][at];
        to[0]                   = first[0];
        to[1]                   = second[0];
        to[2]                   = first[4];
        to[3]                   = second[4];
    }

    // What rows see, shifted so that this lane's bits have the same place in all lanes: is_seen.
    __device__ __forceinline__ uint64_t    seen_by(int row) const { return memory_.seen[row] >> bit_of(lane_ % 4 * 2); }
    __device__ __forceinline__ static bool is_seen(uint64_t seen, int cut, int i) {
        return seen >> bit_of(16 * cut + i % 2 + i / 2 * 8) & 1;
    }

    // of 16 cells, zero where they are not seen
    __device__ __forceinline__ uint2 values_of(int cut, int j, uint64_t seen) const {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            words[i] = is_seen(seen, cut, i) ? values_[cut][i].two(j / 2) : 0;
        }
        const uint32_t pick = j % 2 ? 0x7632 : 0x5410;
        return make_uint2(__byte_perm(words[0], words[1], pick), __byte_perm(words[2], words[3], pick));
    }

    block_memory<size, n_sets> &  memory_;
    int                           warp_, lane_;
    float                         sums_[n_sets][per_lane][4];
    cached_values<type, per_lane> values_[n_cuts][4]; // of the chunk that is computed, or the one behind it
};

} // namespace dw::layer_parts
