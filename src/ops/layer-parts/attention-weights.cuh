// Weights of a chunk's cells in attention: softmax of its scores, pair by pair, with what the chunks before make of it:
// attention-tile.cuh. Eight lanes take a pair, whatever the tile, so that a sum of weights has the same bits in all of
// them. Masks are asked for before scores are there. Test: tests/ops/layer_kernels.py.

#pragma once

#include "ops/door/lanes.cuh"
#include "ops/layer-parts/attention-block.cuh"

namespace dw::layer_parts {

template <int size, int n_sets> class attention_weights {
    static constexpr int n_pairs = n_sets * pairs_of_a_set, n_threads = 32 * warps_of_a_tile<size>;
    static constexpr int n_lanes = 8;               // of a pair
    static constexpr int n_own   = chunk / n_lanes; // places of a lane: four neighbours, and the four 32 behind them
    static constexpr int n_turns = n_pairs * n_lanes > n_threads ? n_pairs * n_lanes / n_threads : 1;

  public:
    __device__ __forceinline__ attention_weights(const attention_arguments & a, block_memory<size, n_sets> & memory) :
        a_(a),
        memory_(memory),
        lane_(threadIdx.x % n_lanes) {
#pragma unroll
        for (int turn = 0; turn < n_turns; ++turn) {
            most_[turn]  = -INFINITY;
            total_[turn] = 0.0f;
        }
    }

    // Raises memory.n_chunks, which is 0, to the number of chunks from `first` on up to the last one of which a row
    // sees a cell before `end`; to all of them if masks cannot be read by four. All threads of a block.
    __device__ __forceinline__ void find_seen(int first, int end, int stream) const {
        constexpr uint32_t two_hidden = 0xfc00fc00; // -INFINITY
        const int          n          = (end - first) / 4;
        const bool         by_four    = a_.masks_are_aligned && (end - first) % 4 == 0;
        uint32_t           found      = by_four ? 0 : (end - first + chunk - 1) / chunk;
        for (int i = threadIdx.x; by_four && i < memory_.n_of_rows * n; i += n_threads) {
            packed_halves<4> masks;
            masks.load(mask_of(memory_.first_row + i / n, stream) + first + i % n * 4);
            const bool is_seen = masks.words[0] != two_hidden || masks.words[1] != two_hidden;
            found              = max(found, is_seen ? (uint32_t) (i % n * 4 / chunk + 1) : 0);
        }
        found = max_of_lanes(found);
        if (threadIdx.x % 32 == 0 && found > 0) {
            atomicMax(&memory_.n_chunks, (int) found);
        }
    }

    __device__ __forceinline__ void ask_for_masks(int first, int stream) {
        const bool by_four = a_.masks_are_aligned && first + chunk <= a_.n_cells;
#pragma unroll
        for (int turn = 0; turn < n_turns; ++turn) {
            if (pair_of(turn) < n_pairs) {
                const half * mask = mask_of(max(memory_.rows[pair_of(turn)], 0), stream);
                if (by_four) {
                    masks_[turn][0].load(mask + place(first, 0));
                    masks_[turn][1].load(mask + place(first, 4));
                } else {
                    load_one_by_one(turn, (const uint16_t *) mask, first);
                }
            }
        }
    }

    // Of scores that are there, and what they make of the sums so far.
    __device__ __forceinline__ void weigh(int first, bool by_row) {
#pragma unroll
        for (int turn = 0; turn < n_turns; ++turn) {
            if (pair_of(turn) < n_pairs) {
                weigh_pair(turn, first, by_row);
            }
        }
    }

    // first: of the pairs of this stream and part
    __device__ __forceinline__ void write(int64_t first) const {
#pragma unroll
        for (int turn = 0; turn < n_turns; ++turn) {
            const int pair = pair_of(turn);
            if (pair < n_pairs && lane_ == 0 && memory_.rows[pair] >= 0) {
                a_.ends[first + memory_.out_pair(pair, a_.n_heads)] = make_float2(most_[turn], total_[turn]);
            }
        }
    }

  private:
    __device__ __forceinline__ const half * mask_of(int row, int stream) const {
        return (const half *) a_.mask.of(0, stream).at(row);
    }
    __device__ __forceinline__ static int pair_of(int turn) { return (threadIdx.x + turn * n_threads) / n_lanes; }
    __device__ __forceinline__ int place(int first, int i) const { return first + 4 * lane_ + i % 4 + i / 4 * 32; }

    __device__ __forceinline__ void load_one_by_one(int turn, const uint16_t * mask, int first) {
        uint32_t bits[n_own];
#pragma unroll
        for (int i = 0; i < n_own; ++i) {
            bits[i] = mask[min(place(first, i), a_.n_cells - 1)];
        }
#pragma unroll
        for (int i = 0; i < n_own; i += 2) {
            masks_[turn][i / 4].words[i / 2 % 2] = bits[i] | bits[i + 1] << 16;
        }
    }

    // What is added to scores; -INFINITY where the row does not look.
    __device__ __forceinline__ void find_biases(float (&to)[n_own], int turn, int first, int row, bool by_row) const {
#pragma unroll
        for (int i = 0; i < n_own; ++i) {
            const uint32_t word = masks_[turn][i / 4].words[i / 2 % 2];
            to[i]               = __half2float(__ushort_as_half((unsigned short) (word >> 16 * (i % 2))));
        }
        if (row < 0 || by_row || first + chunk > a_.n_cells) {
            const bool paths = row >= 0 && by_row;
#pragma unroll
            for (int i = 0; i < n_own; ++i) {
                const int at = 4 * lane_ + i % 4; // of 32
                if (row < 0 || place(first, i) >= a_.n_cells || (paths && memory_.hidden[row][i / 4] >> at & 1)) {
                    to[i] = -INFINITY;
                } else if (paths && memory_.shown[row][i / 4] >> at & 1) {
                    to[i] = 0.0f;
                }
            }
        }
    }

    __device__ __forceinline__ void weigh_pair(int turn, int first, bool by_row) {
        const int pair = pair_of(turn), row = memory_.rows[pair] < 0 ? -1 : memory_.row_of(pair);
        float     biases[n_own];
        find_biases(biases, turn, first, row, by_row);
        const float4 low  = *(const float4 *) &memory_.scores[pair][4 * lane_];
        const float4 high = *(const float4 *) &memory_.scores[pair][4 * lane_ + 32];
        float        x[]  = { low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w };
        uint32_t     seen = 0;
#pragma unroll
        for (int i = 0; i < n_own; ++i) {
            // A NaN score that is not masked becomes infinite. It is the greatest one then, and inf - inf is NaN.
            const bool sees = biases[i] != -INFINITY;
            x[i]            = sees ? fminf(x[i] + biases[i], INFINITY) : -INFINITY;
            seen |= (uint32_t) sees << i;
        }
        const float before = most_[turn];
        const float most   = greatest(fmaxf(
            before, fmaxf(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])), fmaxf(fmaxf(x[4], x[5]), fmaxf(x[6], x[7])))));
        const float sum    = store_weights(pair, x, most > -INFINITY ? most : 0.0f);
        const float factor = most > -INFINITY ? expf(before - most) : 1.0f;
        if (row >= 0) { // all pairs of a row write the same
            ((uint8_t *) &memory_.seen[row])[lane_] = (uint8_t) seen;
        }
        if (lane_ == 0) {
            memory_.factor[pair] = factor;
        }
        most_[turn]  = most;
        total_[turn] = total_[turn] * factor + sum;
    }

    // Returns the sum of the pair's weights, as they are rounded.
    __device__ __forceinline__ float store_weights(int pair, const float (&x)[n_own], float most) {
        packed_halves<4> words[2];
        float            sums[n_own / 2];
#pragma unroll
        for (int i = 0; i < n_own / 2; ++i) {
            const half2  two     = __floats2half2_rn(expf(x[2 * i] - most), expf(x[2 * i + 1] - most));
            const float2 rounded = __half22float2(two);
            sums[i]              = rounded.x + rounded.y;
            memcpy(&words[i / 2].words[i % 2], &two, sizeof(two));
        }
        *(uint2 *) &memory_.weights[pair][4 * lane_]      = words[0].two;
        *(uint2 *) &memory_.weights[pair][4 * lane_ + 32] = words[1].two;
        float sum                                         = (sums[0] + sums[1]) + (sums[2] + sums[3]);
#pragma unroll
        for (int offset = n_lanes / 2; offset > 0; offset /= 2) {
            sum += __shfl_xor_sync(0xffffffff, sum, offset);
        }
        return sum;
    }

    // of the pair's lanes
    __device__ __forceinline__ static float greatest(float x) {
#pragma unroll
        for (int offset = n_lanes / 2; offset > 0; offset /= 2) {
            x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, offset));
        }
        return x;
    }

    const attention_arguments &  a_;
    block_memory<size, n_sets> & memory_;
    int                          lane_;
    float                        most_[n_turns], total_[n_turns]; // greatest score and sum of weights so far
    packed_halves<4>             masks_[n_turns][2];              // of the chunk that is computed, or the one behind it
};

} // namespace dw::layer_parts
