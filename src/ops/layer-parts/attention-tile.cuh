// Attention of up to 32 pairs of a row and a head over a part of the cells, by a block of four or eight warps:
// flash-attention.cu. Products run on tensor cores (mma.m16n8k16), of values of 16 bits with sums in f32; a chunk of 64
// cells at a time, whose keys and values are on their way to registers before they are needed (is_ahead).
//
// Where a tree branches, a chunk that holds draft tokens is read for each row as plain decoding would have it: a node's
// keys and values come from the node's own cell, and count in the place where plain decoding would have stored them
// (draft-paths.cuh). Then, and where rows see other cells than their neighbours, the pairs of one row alone take part
// in a product. Test: tests/ops/layer_kernels.py.

#pragma once

#include "ops/door/ptx.cuh"
#include "ops/layer-parts/attention-weights.cuh"

namespace dw::layer_parts {

template <int size, int n_sets> class attention_tile {
    static constexpr int n_pairs = n_sets * pairs_of_a_set, n_warps = warps_of_a_tile<size>;
    // Keys and values are read while the chunk before is computed. Two sets of large heads leave no registers for that
    // if two blocks are to share a multiprocessor: then one block computes while the other waits, and only L2 reads
    // ahead.
    static constexpr bool is_ahead = size < 256 || n_sets == 1;
    static constexpr int  of_warp  = size / n_warps;        // values of the result
    static constexpr int  per_lane = of_warp / 8;           // of them, neighbours
    static constexpr int  n_eights = chunk / (8 * n_warps); // eight cells whose scores it computes
    static constexpr int  n_chains = 2 / n_eights;          // sums of a score, so that two are on their way
    static constexpr int  n_steps  = size / 32;             // of 32 values of a key
    static constexpr int  n_cuts   = chunk / 16;            // of a chunk's cells, 16 a product
    static constexpr int  n_quads  = size / 4 * n_pairs / (32 * n_warps); // four values of a query, of a thread

  public:
    __device__ __forceinline__ attention_tile(const attention_arguments & a, block_memory<size, n_sets> & memory) :
        a_(a),
        memory_(memory),
        weights_(a, memory),
        stream_(blockIdx.x / n_tiles(a)),
        k_(a.k.of(blockIdx.y, stream_)),
        v_(a.v.of(blockIdx.y, stream_)),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32) {}

    static __host__ __device__ __forceinline__ int n_tiles(const attention_arguments & a) {
        return (a.n_rows * a.group + n_pairs - 1) / n_pairs;
    }

    // What is there before the kernels in front have ended: shapes, trees, and all cells but the newest.
    __device__ __forceinline__ void prepare(int first) {
        const int first_pair = blockIdx.x % n_tiles(a_) * n_pairs;
        const int first_row  = first_pair / a_.group;
        const int n_of_rows  = min((first_pair + n_pairs - 1) / a_.group, a_.n_rows - 1) - first_row + 1;
        memory_.first_row    = first_row; // all threads write the same
        memory_.n_of_rows    = n_of_rows;
        if (threadIdx.x < n_pairs) {
            const int pair             = first_pair + threadIdx.x;
            const int row              = pair / a_.group;
            memory_.rows[threadIdx.x]  = row < a_.n_rows ? row : -1;
            memory_.heads[threadIdx.x] = blockIdx.y * a_.group + pair % a_.group;
        }
        prefetch(first);
        if (a_.tree) {
            const int n_batch = a_.n_rows * (int) (gridDim.x / n_tiles(a_));
            memory_.paths.find(a_.tree, a_.tree_rows, n_batch, stream_ * a_.n_rows + first_row, n_of_rows);
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
        weights_.ask_for_masks(first, stream_);
        ask_for_keys(first);
        if (is_ahead) {
            ask_for_values(first);
        }
#pragma unroll
        for (int i = 0; i < n_quads; ++i) {
            const int   pair = quad(i) / (size / 4), at = quad(i) % (size / 4) * 4;
            const float scale = memory_.rows[pair] < 0 ? 0.0f : a_.scale;
            half2 *     to    = (half2 *) &memory_.queries[pair][at];
            to[0]             = __floats2half2_rn(queries[i].x * scale, queries[i].y * scale);
            to[1]             = __floats2half2_rn(queries[i].z * scale, queries[i].w * scale);
        }
#pragma unroll
        for (int i = 0; i < n_sets * per_lane * 4; ++i) {
            sums_[i / (4 * per_lane)][i / 4 % per_lane][i % 4] = 0.0f;
        }
        __syncthreads();
    }

    // Adds the cells [first, first + chunk), which were asked for; if there is a chunk behind them, go_on is next.
    __device__ __forceinline__ void add(int first, bool has_next) {
        if (!is_ahead && has_next) {
            prefetch(first + chunk);
        }
        const bool by_row = a_.tree && memory_.paths.touch(first);
        for (int turn = 0; turn < (by_row ? memory_.n_of_rows : 1); ++turn) {
            if (by_row) {
                find_sources(first, turn);
                load_keys([&](int i) { return memory_.sources[i]; });
            }
            multiply_keys(by_row ? turn : -1);
        }
        if (is_ahead && has_next) {
            ask_for_keys(first + chunk);
        } else if (!is_ahead) {
            ask_for_values(first);
        }
        __syncthreads();
        weights_.weigh(first, by_row);
        if (is_ahead && has_next) {
            weights_.ask_for_masks(first + chunk, stream_);
        }
        __syncthreads();
        scale_sums();
        if (!by_row && rows_see_alike()) {
            multiply_values();
        } else {
            for (int turn = 0; turn < memory_.n_of_rows; ++turn) {
                if (by_row) {
                    find_sources(first, turn);
                    load_values([&](int i) { return memory_.sources[i]; });
                }
                multiply_values_of(turn);
            }
        }
    }

    // Asks for what the next add wants to be there. Nothing asks for what is not used: old values would keep registers.
    __device__ __forceinline__ void go_on(int first) {
        if (is_ahead) {
            ask_for_values(first);
        } else {
            ask_for_keys(first);
            weights_.ask_for_masks(first, stream_);
        }
    }

    __device__ __forceinline__ void write(int part) const {
        const int64_t first = ((int64_t) stream_ * gridDim.z + part) * a_.n_pairs();
        weights_.write(first);
#pragma unroll
        for (int set = 0; set < n_sets; ++set) {
#pragma unroll
            for (int i = 0; i < 4; ++i) { // rows lane / 4 and lane / 4 + 8, columns 2 (lane % 4) and the next
                const int pair = pairs_of_a_set * set + lane_ / 4 + i / 2 * 8;
                if (memory_.rows[pair] >= 0) {
                    float * to = a_.sums + (first + memory_.out_pair(pair, a_.n_heads)) * size + warp_ * of_warp +
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

    // a chunk into L2, by lines of 64 values
    __device__ __forceinline__ void prefetch(int first) const {
        constexpr int n_lines = chunk * size / 64, n_threads = 32 * n_warps;
        static_assert(n_lines <= n_threads, "a thread has a line");
        const int cell = min(first + (int) threadIdx.x / (size / 64), a_.n_cells - 1);
        const int at   = threadIdx.x % (size / 64) * 64;
        if (n_lines == n_threads || threadIdx.x < n_lines) {
            ptx::prefetch_l2(k_.at(cell) + at);
            ptx::prefetch_l2(v_.at(cell) + at);
        }
    }

    // of a pair, counted from the tile's first
    __device__ __forceinline__ int row_of(int pair) const { return memory_.rows[pair] - memory_.first_row; }

    // of the tile's row `turn`. What was multiplied before has been read.
    __device__ __forceinline__ void find_sources(int first, int turn) {
        __syncthreads();
        if (threadIdx.x < chunk) {
            const auto & path            = memory_.paths.each[turn];
            const int    place           = first + threadIdx.x;
            memory_.sources[threadIdx.x] = path.source(min(place, a_.n_cells - 1));
            const sight    sees          = place < a_.n_cells ? path.of(place) : sight::no;
            const uint32_t shown         = __ballot_sync(0xffffffff, sees == sight::yes);
            const uint32_t hidden        = __ballot_sync(0xffffffff, sees == sight::no);
            if (lane_ == 0) {
                memory_.shown[turn][warp_]  = shown;
                memory_.hidden[turn][warp_] = hidden;
            }
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
#pragma unroll
        for (int eight = 0; eight < n_eights; ++eight) {
            const half * key = k_.at(cell_of(8 * (n_eights * warp_ + eight) + lane_ / 4)) + lane_ % 4 * 8;
#pragma unroll
            for (int step = 0; step < n_steps; ++step) {
                keys_[eight][step].load(key + 32 * step);
            }
        }
    }

    template <class Cells> __device__ __forceinline__ void load_values(const Cells & cell_of) {
#pragma unroll
        for (int cut = 0; cut < n_cuts; ++cut) {
#pragma unroll
            for (int i = 0; i < 4; ++i) { // of a product: cells 2 (lane % 4) and the next, and 8 behind them
                const int cell = cell_of(16 * cut + lane_ % 4 * 2 + i % 2 + i / 2 * 8);
                values_[cut][i].load(v_.at(cell) + warp_ * of_warp + lane_ / 4 * per_lane);
            }
        }
    }

    // Scores of the pairs with the warp's places; of one row's pairs, or of all (-1).
    __device__ __forceinline__ void multiply_keys(int row) {
#pragma unroll
        for (int set = 0; set < n_sets; ++set) {
            const int low                      = pairs_of_a_set * set + lane_ / 4; // and low + 8
            float     d[n_eights][n_chains][4] = {};
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
                    ptx::multiply_16_bits(d[eight][0], first, make_uint2(words[0], words[1]));
                    ptx::multiply_16_bits(d[eight][n_chains - 1], second, make_uint2(words[2], words[3]));
                }
            }
            store_scores(d, low, row);
        }
    }

    // of pairs low and low + 8
    __device__ __forceinline__ void store_scores(const float (&d)[n_eights][n_chains][4], int low, int row) {
#pragma unroll
        for (int i = 0; i < 2 * n_eights; ++i) {
            const int     pair = low + i % 2 * 8, eight = i / 2;
            const float * sums = &d[eight][0][i % 2 * 2];
            float2        two  = make_float2(sums[0], sums[1]);
            if constexpr (n_chains == 2) {
                const float * others = &d[eight][1][i % 2 * 2];
                two                  = make_float2(two.x + others[0], two.y + others[1]);
            }
            if (row < 0 || row_of(pair) == row) {
                *(float2 *) &memory_.scores[pair][8 * (n_eights * warp_ + eight) + lane_ % 4 * 2] = two;
            }
        }
    }

    // a lane compares a row
    __device__ __forceinline__ bool rows_see_alike() const {
        static_assert(n_pairs <= 32, "a warp has a lane for each row");
        const bool differs = memory_.seen[min(lane_, memory_.n_of_rows - 1)] != memory_.seen[0];
        return __ballot_sync(0xffffffff, differs) == 0;
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

    // Weights times values where all rows see the same cells. What they do not see is zero in registers.
    __device__ __forceinline__ void multiply_values() {
        if (memory_.seen[0] != ~(uint64_t) 0) {
            const uint64_t seen = seen_by(0);
#pragma unroll
            for (int i = 0; i < n_cuts * 4; ++i) {
#pragma unroll
                for (uint32_t & word : values_[i / 4][i % 4].words) {
                    word = is_seen(seen, i / 4, i % 4) ? word : 0;
                }
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
    __device__ __forceinline__ void multiply_values_of(int row) {
#pragma unroll
        for (int set = 0; set < n_sets; ++set) {
            const int  low    = pairs_of_a_set * set + lane_ / 4;
            const bool of_low = row_of(low) == row, of_high = row_of(low + 8) == row;
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

    // of 16 cells, zero where they are not seen
    __device__ __forceinline__ uint2 values_of(int cut, int j, uint64_t seen) const {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            words[i] = is_seen(seen, cut, i) ? values_[cut][i].words[j / 2] : 0;
        }
        const uint32_t pick = j % 2 ? 0x7632 : 0x5410;
        return make_uint2(__byte_perm(words[0], words[1], pick), __byte_perm(words[2], words[3], pick));
    }

    const attention_arguments &     a_;
    block_memory<size, n_sets> &    memory_;
    attention_weights<size, n_sets> weights_;
    int                             stream_;
    half_rows                       k_, v_;
    int                             warp_, lane_;
    float                           sums_[n_sets][per_lane][4];
    // of the chunk that is computed, or the one behind it
    neighbours<8>        keys_[n_eights][n_steps];
    neighbours<per_lane> values_[n_cuts][4];
};

} // namespace dw::layer_parts
