// Attention of 16 pairs of a row and a head over a part of the cells, by a block of four warps: flash-attention.cu.
// Products run on tensor cores (mma.m16n8k16), of values of 16 bits with sums in f32; a chunk of 64 cells at a time.
//
// Where a tree branches, a chunk that holds draft tokens is read for each row as plain decoding would have it: a node's
// keys and values come from the node's own cell, and count in the place where plain decoding would have stored them
// (draft-paths.cuh). Then, and where rows see other cells than their neighbours,
// the pairs of one row alone take part in a product. Test: tests/ops/layer_kernels.py.

#pragma once

#include "ops/door/launch.h"
#include "ops/door/ptx.cuh"
#include "ops/layer-parts/dots.cuh"
#include "ops/layer-parts/draft-paths.cuh"

namespace dw::layer_parts {

constexpr int pairs_of_a_tile = 16, warps_of_a_tile = 4, chunk = cells_of_a_chunk;
constexpr int rows_of_a_warp = pairs_of_a_tile / warps_of_a_tile; // pairs whose softmax it computes

// F16, strides in bytes
struct half_rows {
    const char * data;
    int64_t      cell, head, stream;

    static half_rows from(const ggml_tensor * t) {
        return { dw::data_of<const char>(t), (int64_t) t->nb[1], (int64_t) t->nb[2], (int64_t) t->nb[3] };
    }
    __device__ __forceinline__ half_rows of(int h, int s) const {
        return { data + h * head + s * stream, cell, head, stream };
    }
    __device__ __forceinline__ const half * at(int c) const { return (const half *) (data + c * cell); }
};

struct attention_arguments {
    const char *    q;
    int64_t         q_row, q_head, q_stream;  // bytes
    half_rows       k, v, mask;               // mask: a cell is a row
    const int32_t * tree;                     // nullptr: rows see cells where they are
    int             tree_rows;                // M of tree
    int      n_rows, n_cells, n_heads, group; // rows of a stream; heads of queries, and of them to a head of keys
    float    scale;
    float2 * ends; // [streams][parts][pairs]: greatest score, sum of weights
    float *  sums; // [streams][parts][pairs][size]
    float *  out;  // [streams][rows][heads][size]

    __host__ __device__ __forceinline__ int n_pairs() const { return n_rows * n_heads; }
};

// What a block keeps in shared memory.
template <int size> struct block_memory {
    // Gaps let lanes meet different banks.
    __align__(16) half queries[pairs_of_a_tile][size + 32];
    __align__(16) float scores[pairs_of_a_tile][chunk + 8];
    __align__(16) half weights[pairs_of_a_tile][chunk + 8];
    float                        most[pairs_of_a_tile], total[pairs_of_a_tile], factor[pairs_of_a_tile];
    int                          sources[chunk];
    uint64_t                     seen[pairs_of_a_tile]; // by row of the tile: a bit for each place of the chunk
    draft_paths<pairs_of_a_tile> paths;                 // by row of the tile
};

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

template <int size> class attention_tile {
    static constexpr int n_steps  = size / 32;              // of 32 values of a key
    static constexpr int of_warp  = size / warps_of_a_tile; // values of the result
    static constexpr int per_lane = of_warp / 8;            // of them, neighbours
    static constexpr int n_cuts   = chunk / 16;             // of a chunk's cells, 16 a product
    using values_of_chunk         = neighbours<per_lane>[n_cuts][4];

  public:
    __device__ __forceinline__ attention_tile(const attention_arguments & a, block_memory<size> & memory) :
        a_(a),
        memory_(memory),
        key_head_(blockIdx.y),
        first_pair_(blockIdx.x % n_tiles(a) * pairs_of_a_tile),
        stream_(blockIdx.x / n_tiles(a)),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32) {}

    static __host__ __device__ __forceinline__ int n_tiles(const attention_arguments & a) {
        return (a.n_rows * a.group + pairs_of_a_tile - 1) / pairs_of_a_tile;
    }

    // The paths of this tile's rows. Trees are written before the graph.
    __device__ __forceinline__ void find_paths() {
        const int n_batch = a_.n_rows * (int) (gridDim.x / n_tiles(a_));
        memory_.paths.find(a_.tree, a_.tree_rows, n_batch, stream_ * a_.n_rows + first_row(), n_of_rows());
    }

    __device__ __forceinline__ void load_queries() {
        for (int i = threadIdx.x; i < pairs_of_a_tile * (size / 4); i += blockDim.x) {
            const int pair = i / (size / 4), at = i % (size / 4) * 4;
            float4    v = make_float4(0, 0, 0, 0);
            if (is_there(pair)) {
                v = *(const float4 *) (a_.q + row_of(pair) * a_.q_row + head_of(pair) * a_.q_head +
                                       stream_ * a_.q_stream + at * sizeof(float));
            }
            half2 * to = (half2 *) &memory_.queries[pair][at];
            to[0]      = __floats2half2_rn(v.x * a_.scale, v.y * a_.scale);
            to[1]      = __floats2half2_rn(v.z * a_.scale, v.w * a_.scale);
        }
        if (threadIdx.x < pairs_of_a_tile) {
            memory_.most[threadIdx.x]  = -INFINITY;
            memory_.total[threadIdx.x] = 0.0f;
        }
        __syncthreads();
    }

    // Adds the cells [first, first + chunk).
    __device__ __forceinline__ void add(int first) {
        const bool      by_row  = memory_.paths.touch(first);
        const int       n_turns = by_row ? n_of_rows() : 1;
        values_of_chunk values;
        float2          biases[rows_of_a_warp];
        load_biases(biases, first, by_row);
        for (int turn = 0; turn < n_turns; ++turn) {
            find_sources(first, turn);
            if (!by_row) {
                load_values(values); // on their way while keys are multiplied
            }
            multiply_keys(by_row ? turn : -1);
            __syncthreads();
        }
        weigh(biases);
        __syncthreads();
        scale_sums();
        const bool together = !by_row && rows_see_alike();
        for (int turn = 0; turn < (together ? 1 : n_of_rows()); ++turn) {
            if (by_row) {
                find_sources(first, turn);
                load_values(values);
            }
            multiply_values(values, turn, together);
            __syncthreads();
        }
    }

    __device__ __forceinline__ void write(int part) const {
        const int64_t first = ((int64_t) stream_ * gridDim.z + part) * a_.n_pairs();
        if (threadIdx.x < pairs_of_a_tile && is_there(threadIdx.x)) {
            a_.ends[first + out_pair(threadIdx.x)] = make_float2(memory_.most[threadIdx.x], memory_.total[threadIdx.x]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) { // rows lane / 4 and lane / 4 + 8, columns 2 (lane % 4) and the next
            const int pair = lane_ / 4 + i / 2 * 8;
            if (is_there(pair)) {
                float * to =
                    a_.sums + (first + out_pair(pair)) * size + warp_ * of_warp + (lane_ % 4 * 2 + i % 2) * per_lane;
#pragma unroll
                for (int j = 0; j < per_lane; j += 2) {
                    *(float2 *) (to + j) = make_float2(sums_[j][i], sums_[j + 1][i]);
                }
            }
        }
    }

  private:
    __device__ __forceinline__ bool is_there(int pair) const { return first_pair_ + pair < a_.n_rows * a_.group; }
    __device__ __forceinline__ int  row_of(int pair) const { return (first_pair_ + pair) / a_.group; }
    __device__ __forceinline__ int  head_of(int pair) const {
        return key_head_ * a_.group + (first_pair_ + pair) % a_.group;
    }
    __device__ __forceinline__ int out_pair(int pair) const { return row_of(pair) * a_.n_heads + head_of(pair); }
    __device__ __forceinline__ int first_row() const { return row_of(0); }
    __device__ __forceinline__ int n_of_rows() const {
        return min(row_of(pairs_of_a_tile - 1), a_.n_rows - 1) - first_row() + 1;
    }

    // of the tile's row `turn`
    __device__ __forceinline__ void find_sources(int first, int turn) {
        if (threadIdx.x < chunk) {
            const int place              = min(first + (int) threadIdx.x, a_.n_cells - 1);
            memory_.sources[threadIdx.x] = memory_.paths.each[turn].source(place);
        }
        __syncthreads();
    }

    __device__ __forceinline__ void load_values(values_of_chunk & values) const {
        const half_rows v = a_.v.of(key_head_, stream_);
#pragma unroll
        for (int cut = 0; cut < n_cuts; ++cut) {
#pragma unroll
            for (int i = 0; i < 4; ++i) { // of a product: cells 2 (lane % 4) and the next, and 8 behind them
                const int cell = memory_.sources[16 * cut + lane_ % 4 * 2 + i % 2 + i / 2 * 8];
                values[cut][i].load(v.at(cell) + warp_ * of_warp + lane_ / 4 * per_lane);
            }
        }
    }

    // Scores of the pairs with 16 places a warp; of one row's pairs, or of all (-1).
    __device__ __forceinline__ void multiply_keys(int row) {
        const half_rows k = a_.k.of(key_head_, stream_);
#pragma unroll
        for (int eight = 0; eight < 2; ++eight) {
            const int     begin = 16 * warp_ + 8 * eight;
            const half *  key   = k.at(memory_.sources[begin + lane_ / 4]) + lane_ % 4 * 8;
            neighbours<8> keys[n_steps];
            float         d[4] = {};
#pragma unroll
            for (int step = 0; step < n_steps; ++step) {
                keys[step].load(key + 32 * step);
            }
#pragma unroll
            for (int step = 0; step < n_steps; ++step) {
                neighbours<8> a, b; // of rows lane / 4 and lane / 4 + 8
                a.load(&memory_.queries[lane_ / 4][lane_ % 4 * 8 + 32 * step]);
                b.load(&memory_.queries[lane_ / 4 + 8][lane_ % 4 * 8 + 32 * step]);
                const uint32_t first[]  = { a.words[0], b.words[0], a.words[1], b.words[1] };
                const uint32_t second[] = { a.words[2], b.words[2], a.words[3], b.words[3] };
                ptx::multiply_16_bits(d, first, make_uint2(keys[step].words[0], keys[step].words[1]));
                ptx::multiply_16_bits(d, second, make_uint2(keys[step].words[2], keys[step].words[3]));
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int pair = lane_ / 4 + 8 * i;
                if (row < 0 || row_of(pair) - first_row() == row) {
                    *(float2 *) &memory_.scores[pair][begin + lane_ % 4 * 2] = make_float2(d[2 * i], d[2 * i + 1]);
                }
            }
        }
    }

    __device__ __forceinline__ float bias(int pair, int place, bool by_row) const {
        if (place >= a_.n_cells || !is_there(pair)) {
            return -INFINITY;
        }
        const sight sees = by_row ? memory_.paths.each[row_of(pair) - first_row()].of(place) : sight::as_masked;
        return sees == sight::yes  ? 0.0f
               : sees == sight::no ? -INFINITY
                                   : __half2float(a_.mask.of(0, stream_).at(row_of(pair))[place]);
    }

    // of two places a lane, for the pairs whose softmax this warp computes
    __device__ __forceinline__ void load_biases(float2 (&to)[rows_of_a_warp], int first, bool by_row) const {
#pragma unroll
        for (int i = 0; i < rows_of_a_warp; ++i) {
            const int pair = rows_of_a_warp * warp_ + i;
            to[i]          = make_float2(bias(pair, first + lane_, by_row), bias(pair, first + lane_ + 32, by_row));
        }
    }

    // NaN counts as infinite where it is seen: then the greatest score is, and the weights of both become NaN.
    __device__ __forceinline__ float scored(int pair, int at, float bias) const {
        const float score = memory_.scores[pair][at] + bias;
        return bias == -INFINITY ? -INFINITY : isnan(score) ? INFINITY : score;
    }

    // Weights of the chunk's cells, and what they make of the sums so far.
    __device__ __forceinline__ void weigh(const float2 (&biases)[rows_of_a_warp]) {
#pragma unroll
        for (int i = 0; i < rows_of_a_warp; ++i) {
            const int   pair   = rows_of_a_warp * warp_ + i;
            const float x      = scored(pair, lane_, biases[i].x);
            const float y      = scored(pair, lane_ + 32, biases[i].y);
            const float before = memory_.most[pair];
            const float most   = fmaxf(before, most_of_warp(fmaxf(x, y)));
            const bool  sees   = most > -INFINITY;
            const auto  low    = __ballot_sync(0xffffffff, biases[i].x > -INFINITY);
            const auto  high   = __ballot_sync(0xffffffff, biases[i].y > -INFINITY);
            const half  p = __float2half(sees ? expf(x - most) : 0.0f), q = __float2half(sees ? expf(y - most) : 0.0f);
            memory_.weights[pair][lane_]      = p;
            memory_.weights[pair][lane_ + 32] = q;
            const float sum                   = sum_of_lanes(__half2float(p) + __half2float(q));
            if (lane_ == 0) {
                if (is_there(pair) && (pair == 0 || row_of(pair - 1) < row_of(pair))) {
                    memory_.seen[row_of(pair) - first_row()] = (uint64_t) high << 32 | low;
                }
                const float factor   = sees ? expf(before - most) : 1.0f;
                memory_.factor[pair] = factor;
                memory_.most[pair]   = most;
                memory_.total[pair]  = memory_.total[pair] * factor + sum;
            }
        }
    }

    __device__ __forceinline__ bool rows_see_alike() const {
        bool alike = true;
        for (int i = 1; i < n_of_rows(); ++i) {
            alike = alike && memory_.seen[i] == memory_.seen[0];
        }
        return alike;
    }

    __device__ __forceinline__ static float most_of_warp(float x) {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
            x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, offset));
        }
        return x;
    }

    __device__ __forceinline__ void scale_sums() {
        const float factors[] = { memory_.factor[lane_ / 4], memory_.factor[lane_ / 4 + 8] };
#pragma unroll
        for (int j = 0; j < per_lane; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sums_[j][i] *= factors[i / 2];
            }
        }
    }

    // Weights of the pairs of the tile's row `turn`, or of all, times values of the cells that they see. What others
    // see is zero, so that sums do not depend on how tensor cores add zeros to other values.
    __device__ __forceinline__ void multiply_values(const values_of_chunk & values, int turn, bool together) {
        const uint64_t seen       = memory_.seen[turn] >> lane_ % 4 * 2;
        const auto     takes_part = [&](int pair) { return together || row_of(pair) - first_row() == turn; };
        const bool     of_low = takes_part(lane_ / 4), of_high = takes_part(lane_ / 4 + 8);
        uint32_t       weights[n_cuts][4];
#pragma unroll
        for (int cut = 0; cut < n_cuts; ++cut) {
            const uint32_t * low  = (const uint32_t *) &memory_.weights[lane_ / 4][16 * cut + lane_ % 4 * 2];
            const uint32_t * high = (const uint32_t *) &memory_.weights[lane_ / 4 + 8][16 * cut + lane_ % 4 * 2];
            weights[cut][0]       = of_low ? low[0] : 0;
            weights[cut][1]       = of_high ? high[0] : 0;
            weights[cut][2]       = of_low ? low[4] : 0;
            weights[cut][3]       = of_high ? high[4] : 0;
        }
#pragma unroll
        for (int j = 0; j < per_lane; ++j) {
            float d[] = { sums_[j][0], sums_[j][1], sums_[j][2], sums_[j][3] };
#pragma unroll
            for (int cut = 0; cut < n_cuts; ++cut) {
                uint32_t words[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    words[i] = seen >> (16 * cut + i % 2 + i / 2 * 8) & 1 ? values[cut][i].words[j / 2] : 0;
                }
                const uint32_t pick = j % 2 ? 0x7632 : 0x5410;
                ptx::multiply_16_bits(
                    d, weights[cut],
                    make_uint2(__byte_perm(words[0], words[1], pick), __byte_perm(words[2], words[3], pick)));
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sums_[j][i] = (i < 2 ? of_low : of_high) ? d[i] : sums_[j][i];
            }
        }
    }

    const attention_arguments & a_;
    block_memory<size> &        memory_;
    int                         key_head_, first_pair_, stream_, warp_, lane_;
    float                       sums_[per_lane][4] = {};
};

} // namespace dw::layer_parts
