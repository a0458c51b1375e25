// Attention of up to 32 pairs of a row and a head over a part of the cells, by a block of four or eight
// warps: flash-attention.cu. Products run on tensor cores (mma.m16n8k16), of values of 16 bits with sums in f32; a
// chunk of 64 cells at a time, whose keys and values are on their way to registers while the chunk before is computed.
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

constexpr int pairs_of_a_set = 16, chunk = cells_of_a_chunk;

// Registers hold a chunk's keys and values: enough of them for two blocks a multiprocessor.
template <int size> constexpr int warps_of_a_tile = size == 256 ? 8 : 4;

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
template <int size, int n_sets> struct block_memory {
    static constexpr int n_pairs = n_sets * pairs_of_a_set;

    // Gaps let lanes meet different banks.
    __align__(16) half queries[n_pairs][size + 32];
    __align__(16) float scores[n_pairs][chunk + 8];
    __align__(16) half weights[n_pairs][chunk + 8];
    float                most[n_pairs], total[n_pairs], factor[n_pairs];
    int                  rows[n_pairs], heads[n_pairs]; // row -1: no such pair
    int                  sources[chunk];
    uint64_t             seen[n_pairs]; // by row of the tile: a bit for each place of the chunk
    draft_paths<n_pairs> paths;         // by row of the tile
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

template <int size, int n_sets> class attention_tile {
    static constexpr int n_pairs = n_sets * pairs_of_a_set, n_warps = warps_of_a_tile<size>;
    static constexpr int of_warp  = size / n_warps;                      // values of the result
    static constexpr int per_lane = of_warp / 8;                         // of them, neighbours
    static constexpr int n_soft   = n_pairs / n_warps;                   // pairs whose softmax a warp computes
    static constexpr int n_eights = chunk / (8 * n_warps);               // eight cells whose scores it computes
    static constexpr int n_steps  = size / 32;                           // of 32 values of a key
    static constexpr int n_cuts   = chunk / 16;                          // of a chunk's cells, 16 a product
    static constexpr int n_quads  = size / 4 * n_pairs / (32 * n_warps); // four values of a query, of a thread

  public:
    __device__ __forceinline__ attention_tile(const attention_arguments & a, block_memory<size, n_sets> & memory) :
        a_(a),
        memory_(memory),
        key_head_(blockIdx.y),
        stream_(blockIdx.x / n_tiles(a)),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32) {}

    static __host__ __device__ __forceinline__ int n_tiles(const attention_arguments & a) {
        return (a.n_rows * a.group + n_pairs - 1) / n_pairs;
    }

    // What is there before the kernels in front have ended: shapes, trees, and all cells but the newest.
    __device__ __forceinline__ void prepare(int first) {
        const int first_pair = blockIdx.x % n_tiles(a_) * n_pairs;
        first_row_           = first_pair / a_.group;
        n_of_rows_           = min((first_pair + n_pairs - 1) / a_.group, a_.n_rows - 1) - first_row_ + 1;
        if (threadIdx.x < n_pairs) {
            const int pair             = first_pair + threadIdx.x;
            const int row              = pair / a_.group;
            memory_.rows[threadIdx.x]  = row < a_.n_rows ? row : -1;
            memory_.heads[threadIdx.x] = key_head_ * a_.group + pair % a_.group;
            memory_.most[threadIdx.x]  = -INFINITY;
            memory_.total[threadIdx.x] = 0.0f;
        }
        for (int i = threadIdx.x; i < chunk * size / 64; i += blockDim.x) { // lines of 64 values
            const int cell = min(first + i / (size / 64), a_.n_cells - 1), at = i % (size / 64) * 64;
            ptx::prefetch_l2(a_.k.of(key_head_, stream_).at(cell) + at);
            ptx::prefetch_l2(a_.v.of(key_head_, stream_).at(cell) + at);
        }
        if (a_.tree) {
            const int n_batch = a_.n_rows * (int) (gridDim.x / n_tiles(a_));
            memory_.paths.find(a_.tree, a_.tree_rows, n_batch, stream_ * a_.n_rows + first_row_, n_of_rows_);
        } else {
            __syncthreads();
        }
    }

    // Queries into shared memory, while the first chunk is on its way.
    __device__ __forceinline__ void begin(int first) {
        float4 queries[n_quads];
#pragma unroll
        for (int i = 0; i < n_quads; ++i) {
            const int pair = quad(i) / (size / 4), at = quad(i) % (size / 4) * 4;
            queries[i] =
                *(const float4 *) (a_.q + max(memory_.rows[pair], 0) * a_.q_row + memory_.heads[pair] * a_.q_head +
                                   stream_ * a_.q_stream + at * sizeof(float));
        }
        ask_for_masks(first);
        ask_for_keys(first);
        ask_for_values(first);
#pragma unroll
        for (int i = 0; i < n_quads; ++i) {
            const int   pair = quad(i) / (size / 4), at = quad(i) % (size / 4) * 4;
            const float scale = memory_.rows[pair] < 0 ? 0.0f : a_.scale;
            half2 *     to    = (half2 *) &memory_.queries[pair][at];
            to[0]             = __floats2half2_rn(queries[i].x * scale, queries[i].y * scale);
            to[1]             = __floats2half2_rn(queries[i].z * scale, queries[i].w * scale);
        }
        __syncthreads();
    }

    // Adds the cells [first, first + chunk), which were asked for; asks for the chunk behind them if there is one.
    __device__ __forceinline__ void add(int first, bool has_next) {
        const bool by_row = a_.tree && memory_.paths.touch(first);
        for (int turn = 0; turn < (by_row ? n_of_rows_ : 1); ++turn) {
            if (by_row) {
                find_sources(first, turn);
                load_keys([&](int i) { return memory_.sources[i]; });
            }
            multiply_keys(by_row ? turn : -1);
        }
        if (has_next) {
            ask_for_keys(first + chunk);
        }
        __syncthreads();
        weigh(first, by_row);
        if (has_next) {
            ask_for_masks(first + chunk);
        }
        __syncthreads();
        scale_sums();
        const bool together = !by_row && rows_see_alike();
        for (int turn = 0; turn < (together ? 1 : n_of_rows_); ++turn) {
            if (by_row) {
                find_sources(first, turn);
                load_values([&](int i) { return memory_.sources[i]; });
            }
            multiply_values(turn, together);
        }
        if (has_next) {
            ask_for_values(first + chunk);
        }
    }

    __device__ __forceinline__ void write(int part) const {
        const int64_t first = ((int64_t) stream_ * gridDim.z + part) * a_.n_pairs();
        if (threadIdx.x < n_pairs && memory_.rows[threadIdx.x] >= 0) {
            a_.ends[first + out_pair(threadIdx.x)] = make_float2(memory_.most[threadIdx.x], memory_.total[threadIdx.x]);
        }
#pragma unroll
        for (int set = 0; set < n_sets; ++set) {
#pragma unroll
            for (int i = 0; i < 4; ++i) { // rows lane / 4 and lane / 4 + 8, columns 2 (lane % 4) and the next
                const int pair = pairs_of_a_set * set + lane_ / 4 + i / 2 * 8;
                if (memory_.rows[pair] >= 0) {
                    float * to = a_.sums + (first + out_pair(pair)) * size + warp_ * of_warp +
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
    __device__ __forceinline__ static int quad(int i) { return threadIdx.x + i * 32 * n_warps; }
    __device__ __forceinline__ int        out_pair(int pair) const {
        return memory_.rows[pair] * a_.n_heads + memory_.heads[pair];
    }
    // of a pair, counted from the tile's first
    __device__ __forceinline__ int row_of(int pair) const { return memory_.rows[pair] - first_row_; }

    // of the tile's row `turn`. What was multiplied before has been read.
    __device__ __forceinline__ void find_sources(int first, int turn) {
        __syncthreads();
        if (threadIdx.x < chunk) {
            const int place              = min(first + (int) threadIdx.x, a_.n_cells - 1);
            memory_.sources[threadIdx.x] = memory_.paths.each[turn].source(place);
        }
        __syncthreads();
    }

    __device__ __forceinline__ void ask_for_keys(int first) {
        load_keys([&](int i) { return min(first + i, a_.n_cells - 1); });
    }
    __device__ __forceinline__ void ask_for_values(int first) {
        load_values([&](int i) { return min(first + i, a_.n_cells - 1); });
    }

    // of each eight cells a lane has one
    template <class Cells> __device__ __forceinline__ void load_keys(const Cells & cell_of) {
        const half_rows k = a_.k.of(key_head_, stream_);
#pragma unroll
        for (int eight = 0; eight < n_eights; ++eight) {
            const half * key = k.at(cell_of(8 * (n_eights * warp_ + eight) + lane_ / 4)) + lane_ % 4 * 8;
#pragma unroll
            for (int step = 0; step < n_steps; ++step) {
                keys_[eight][step].load(key + 32 * step);
            }
        }
    }

    template <class Cells> __device__ __forceinline__ void load_values(const Cells & cell_of) {
        const half_rows v = a_.v.of(key_head_, stream_);
#pragma unroll
        for (int cut = 0; cut < n_cuts; ++cut) {
#pragma unroll
            for (int i = 0; i < 4; ++i) { // of a product: cells 2 (lane % 4) and the next, and 8 behind them
                const int cell = cell_of(16 * cut + lane_ % 4 * 2 + i % 2 + i / 2 * 8);
                values_[cut][i].load(v.at(cell) + warp_ * of_warp + lane_ / 4 * per_lane);
            }
        }
    }

    // of two places a lane, for the pairs whose softmax this warp computes
    __device__ __forceinline__ void ask_for_masks(int first) {
#pragma unroll
        for (int i = 0; i < n_soft; ++i) {
            const half * mask = a_.mask.of(0, stream_).at(max(memory_.rows[n_soft * warp_ + i], 0));
            masks_[i][0]      = mask[min(first + lane_, a_.n_cells - 1)];
            masks_[i][1]      = mask[min(first + lane_ + 32, a_.n_cells - 1)];
        }
    }

    // Scores of the pairs with the warp's places; of one row's pairs, or of all (-1).
    __device__ __forceinline__ void multiply_keys(int row) {
#pragma unroll
        for (int set = 0; set < n_sets; ++set) {
            const int low            = pairs_of_a_set * set + lane_ / 4; // and low + 8
            float     d[n_eights][4] = {};
#pragma unroll
            for (int step = 0; step < n_steps; ++step) {
                neighbours<8> a, b;
                a.load(&memory_.queries[low][lane_ % 4 * 8 + 32 * step]);
                b.load(&memory_.queries[low + 8][lane_ % 4 * 8 + 32 * step]);
                const uint32_t first[]  = { a.words[0], b.words[0], a.words[1], b.words[1] };
                const uint32_t second[] = { a.words[2], b.words[2], a.words[3], b.words[3] };
#pragma unroll
                for (int eight = 0; eight < n_eights; ++eight) {
                    const uint32_t * words = keys_[eight][step].words;
                    ptx::multiply_16_bits(d[eight], first, make_uint2(words[0], words[1]));
                    ptx::multiply_16_bits(d[eight], second, make_uint2(words[2], words[3]));
                }
            }
#pragma unroll
            for (int i = 0; i < 2 * n_eights; ++i) {
                const int pair = low + i % 2 * 8, eight = i / 2;
                if (row < 0 || row_of(pair) == row) {
                    *(float2 *) &memory_.scores[pair][8 * (n_eights * warp_ + eight) + lane_ % 4 * 2] =
                        make_float2(d[eight][i % 2 * 2], d[eight][i % 2 * 2 + 1]);
                }
            }
        }
    }

    __device__ __forceinline__ float bias(int pair, int place, half mask, bool by_row) const {
        if (place >= a_.n_cells || memory_.rows[pair] < 0) {
            return -INFINITY;
        }
        const sight sees = by_row ? memory_.paths.each[row_of(pair)].of(place) : sight::as_masked;
        return sees == sight::yes ? 0.0f : sees == sight::no ? -INFINITY : __half2float(mask);
    }

    // NaN counts as infinite where it is seen: then the greatest score is, and the weights of both become NaN.
    __device__ __forceinline__ float scored(int pair, int at, float bias) const {
        const float score = memory_.scores[pair][at] + bias;
        return bias == -INFINITY ? -INFINITY : isnan(score) ? INFINITY : score;
    }

    // Weights of the chunk's cells, and what they make of the sums so far.
    __device__ __forceinline__ void weigh(int first, bool by_row) {
#pragma unroll
        for (int i = 0; i < n_soft; ++i) {
            const int   pair = n_soft * warp_ + i;
            const float low  = bias(pair, first + lane_, masks_[i][0], by_row);
            const float high = bias(pair, first + lane_ + 32, masks_[i][1], by_row);
            const float x = scored(pair, lane_, low), y = scored(pair, lane_ + 32, high);
            const float before = memory_.most[pair];
            const float most   = fmaxf(before, most_of_lanes(fmaxf(x, y)));
            const bool  sees   = most > -INFINITY;
            const auto  lows   = __ballot_sync(0xffffffff, low > -INFINITY);
            const auto  highs  = __ballot_sync(0xffffffff, high > -INFINITY);
            const half  p = __float2half(sees ? expf(x - most) : 0.0f), q = __float2half(sees ? expf(y - most) : 0.0f);
            memory_.weights[pair][lane_]      = p;
            memory_.weights[pair][lane_ + 32] = q;
            const float sum                   = sum_of_lanes(__half2float(p) + __half2float(q));
            if (lane_ == 0) {
                if (memory_.rows[pair] >= 0 && (pair == 0 || memory_.rows[pair - 1] < memory_.rows[pair])) {
                    memory_.seen[row_of(pair)] = (uint64_t) highs << 32 | lows;
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
        for (int i = 1; i < n_of_rows_; ++i) {
            alike = alike && memory_.seen[i] == memory_.seen[0];
        }
        return alike;
    }

    __device__ __forceinline__ void scale_sums() {
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

    // Weights of a set's pairs, as a product takes them; 0 for those that take no part.
    __device__ __forceinline__ void load_weights(uint32_t (&to)[n_cuts][4], int low, bool of_low, bool of_high) const {
#pragma unroll
        for (int cut = 0; cut < n_cuts; ++cut) {
            const uint32_t * first  = (const uint32_t *) &memory_.weights[low][16 * cut + lane_ % 4 * 2];
            const uint32_t * second = (const uint32_t *) &memory_.weights[low + 8][16 * cut + lane_ % 4 * 2];
            to[cut][0]              = of_low ? first[0] : 0;
            to[cut][1]              = of_high ? second[0] : 0;
            to[cut][2]              = of_low ? first[4] : 0;
            to[cut][3]              = of_high ? second[4] : 0;
        }
    }

    // Weights of the pairs of the tile's row `turn`, or of all, times values of the cells that they see. What others
    // see is zero, so that sums do not depend on how tensor cores add zeros to other values.
    __device__ __forceinline__ void multiply_values(int turn, bool together) {
        const uint64_t seen = memory_.seen[turn] >> lane_ % 4 * 2;
#pragma unroll
        for (int set = 0; set < n_sets; ++set) {
            const int  low     = pairs_of_a_set * set + lane_ / 4;
            const bool of_low  = together || row_of(low) == turn;
            const bool of_high = together || row_of(low + 8) == turn;
            uint32_t   weights[n_cuts][4];
            load_weights(weights, low, of_low, of_high);
#pragma unroll
            for (int j = 0; j < per_lane; ++j) {
                float d[] = { sums_[set][j][0], sums_[set][j][1], sums_[set][j][2], sums_[set][j][3] };
#pragma unroll
                for (int cut = 0; cut < n_cuts; ++cut) {
                    ptx::multiply_16_bits(d, weights[cut], values_of(cut, j, (uint32_t) (seen >> 16 * cut)));
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sums_[set][j][i] = (i < 2 ? of_low : of_high) ? d[i] : sums_[set][j][i];
                }
            }
        }
    }

    // of 16 cells, of which bits 0, 1, 8 and 9 of `seen` say whether this lane's are seen
    __device__ __forceinline__ uint2 values_of(int cut, int j, uint32_t seen) const {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            words[i] = seen >> (i % 2 + i / 2 * 8) & 1 ? values_[cut][i].words[j / 2] : 0;
        }
        const uint32_t pick = j % 2 ? 0x7632 : 0x5410;
        return make_uint2(__byte_perm(words[0], words[1], pick), __byte_perm(words[2], words[3], pick));
    }

    const attention_arguments &  a_;
    block_memory<size, n_sets> & memory_;
    int                          key_head_, stream_, warp_, lane_, first_row_, n_of_rows_;
    float                        sums_[n_sets][per_lane][4] = {};
    // of the chunk that is computed, or the one behind it
    neighbours<8>        keys_[n_eights][n_steps];
    neighbours<per_lane> values_[n_cuts][4];
    half                 masks_[n_soft][2];
};

} // namespace dw::layer_parts
