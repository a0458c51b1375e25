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
#include "ops/layer-parts/attention-scores.cuh"
#include "ops/layer-parts/attention-stage.cuh"
#include "ops/layer-parts/attention-values.cuh"
#include "ops/layer-parts/attention-weights.cuh"

namespace dw::layer_parts {

template <ggml_type type, int size, int n_sets> class attention_tile {
    static constexpr int n_pairs = n_sets * pairs_of_a_set, n_warps = warps_of_a_tile<size>;
    // Keys and values are read while the chunk before is computed. Two sets of large heads leave no registers for that
    // if two blocks are to share a multiprocessor: then one block computes while the other waits, and only L2 reads
    // ahead.
    static constexpr bool is_ahead = size < 256 || n_sets == 1;
    using stage                    = chunk_stage<type, size>;
    static constexpr int n_quads   = size / 4 * n_pairs / (32 * n_warps); // four values of a query, of a thread

  public:
    __device__ __forceinline__ attention_tile(const attention_arguments & a, block_memory<size, n_sets> & memory,
                                              char * stage_memory) :
        a_(a),
        memory_(memory),
        stream_(blockIdx.x / n_tiles(a)),
        k_(a.k.of(blockIdx.y, stream_)),
        v_(a.v.of(blockIdx.y, stream_)),
        stage_(stage_memory),
        scores_(memory),
        weights_(a, memory),
        values_(memory) {}

    static __host__ __device__ __forceinline__ int n_tiles(const attention_arguments & a) {
        return (a.n_rows * a.group + n_pairs - 1) / n_pairs;
    }

    // What is there before the kernels in front have ended: shapes, masks, trees, and all cells but the newest. Returns
    // the end of the chunks from `first` on that are read: behind it no row sees a cell before `end`.
    __device__ __forceinline__ int prepare(int first, int end) {
        const int first_pair = blockIdx.x % n_tiles(a_) * n_pairs;
        const int first_row  = first_pair / a_.group;
        const int n_of_rows  = min((first_pair + n_pairs - 1) / a_.group, a_.n_rows - 1) - first_row + 1;
        memory_.first_row    = first_row; // all threads write the same
        memory_.n_of_rows    = n_of_rows;
        memory_.n_chunks     = 0;
        if (threadIdx.x < n_pairs) {
            const int pair             = first_pair + threadIdx.x;
            const int row              = pair / a_.group;
            memory_.rows[threadIdx.x]  = row < a_.n_rows ? row : -1;
            memory_.heads[threadIdx.x] = blockIdx.y * a_.group + pair % a_.group;
        }
        if (a_.tree) {
            const int n_batch = a_.n_rows * (int) (gridDim.x / n_tiles(a_));
            memory_.paths.find(a_.tree, a_.tree_rows, n_batch, stream_ * a_.n_rows + first_row, n_of_rows);
        } else {
            __syncthreads();
        }
        weights_.find_seen(first, end, stream_);
        __syncthreads();
        int n_chunks = memory_.n_chunks;
        if (a_.tree && memory_.paths.highest >= first) { // a path may show what a mask hides
            n_chunks = max(n_chunks, (min(memory_.paths.highest, end - 1) - first) / chunk + 1);
        }
        if (n_chunks > 0) {
            prefetch(first);
        }
        return min(first + n_chunks * chunk, end);
    }

    // The result of a part of which no row sees a cell.
    __device__ __forceinline__ void write_nothing(int part) const { weights_.write(first_of(part)); }

    // Queries into shared memory, while the first chunk is on its way.
    __device__ __forceinline__ void begin(int first) {
        float4 queries[n_quads];
        if (stage::is_used) {
            stage_.copy(k_, v_, first, a_.n_cells);
        }
#pragma unroll
        for (int i = 0; i < n_quads; ++i) {
            const int pair = quad(i) / (size / 4), at = quad(i) % (size / 4) * 4;
            queries[i] =
                *(const float4 *) (a_.q + max(memory_.rows[pair], 0) * a_.q_row + memory_.heads[pair] * a_.q_head +
                                   stream_ * a_.q_stream + at * sizeof(float));
        }
        weights_.ask_for_masks(first, stream_);
        take(first);
#pragma unroll
        for (int i = 0; i < n_quads; ++i) {
            const int   pair = quad(i) / (size / 4), at = quad(i) % (size / 4) * 4;
            const float scale = memory_.rows[pair] < 0 ? 0.0f : a_.scale;
            half2 *     to    = (half2 *) &memory_.queries[pair][at];
            to[0]             = __floats2half2_rn(queries[i].x * scale, queries[i].y * scale);
            to[1]             = __floats2half2_rn(queries[i].z * scale, queries[i].w * scale);
        }
        values_.begin();
        __syncthreads();
    }

    // Adds the cells [first, first + chunk), which were asked for; if there is a chunk behind them, go_on is next.
    __device__ __forceinline__ void add(int first, bool has_next) {
        if (!is_ahead && has_next) {
            prefetch(first + chunk);
        } else if (stage::is_used && has_next) { // what was there is in registers
            stage_.copy(k_, v_, first + chunk, a_.n_cells);
        }
        const bool by_row = a_.tree && memory_.paths.touch(first);
        for (int turn = 0; turn < (by_row ? memory_.n_of_rows : 1); ++turn) {
            if (by_row) {
                find_sources(first, turn);
                scores_.load([&](int i) { return k_.at(memory_.sources[i]); });
            }
            scores_.multiply(by_row ? turn : -1);
        }
        if (!is_ahead) {
            ask_for_values(first);
        } else if (!stage::is_used && has_next) {
            ask_for_keys(first + chunk);
        }
        __syncthreads();
        if (stage::is_used && !is_ahead && has_next) {
            stage_.copy(k_, v_, first + chunk, a_.n_cells);
        }
        weights_.weigh(first, by_row);
        if (is_ahead && has_next) {
            weights_.ask_for_masks(first + chunk, stream_);
        }
        __syncthreads();
        values_.scale();
        if (!by_row && rows_see_alike()) {
            values_.multiply();
        } else {
            for (int turn = 0; turn < memory_.n_of_rows; ++turn) {
                if (by_row) {
                    find_sources(first, turn);
                    values_.load([&](int i) { return v_.at(memory_.sources[i]); });
                }
                values_.multiply_of(turn);
            }
        }
    }

    // Asks for what the next add wants to be there. Nothing asks for what is not used: old values would keep registers.
    __device__ __forceinline__ void go_on(int first) {
        if (stage::is_used) {
            take(first);
        } else if (is_ahead) {
            ask_for_values(first);
        } else {
            ask_for_keys(first);
        }
        if (!is_ahead) {
            weights_.ask_for_masks(first, stream_);
        }
    }

    __device__ __forceinline__ void write(int part) const {
        weights_.write(first_of(part));
        values_.write(a_.sums + first_of(part) * size, a_.n_heads);
    }

  private:
    // of the pairs of the block's stream
    __device__ __forceinline__ int64_t first_of(int part) const {
        return ((int64_t) stream_ * gridDim.z + part) * a_.n_pairs();
    }

    __device__ __forceinline__ static int quad(int i) { return threadIdx.x + i * 32 * n_warps; }

    // a chunk into L2, by lines
    __device__ __forceinline__ void prefetch(int first) const {
        constexpr int line = 128, of_cell = (bytes_of<type, size> + line - 1) / line;
        constexpr int n_lines = chunk * of_cell, n_threads = 32 * n_warps;
        static_assert(n_lines <= n_threads, "a thread has a line");
        const int cell = min(first + (int) threadIdx.x / of_cell, a_.n_cells - 1);
        const int at   = threadIdx.x % of_cell * line;
        if (n_lines == n_threads || threadIdx.x < n_lines) {
            ptx::prefetch_l2(k_.at(cell) + at);
            ptx::prefetch_l2(v_.at(cell) + at);
        }
    }

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
            if (threadIdx.x % 32 == 0) {
                memory_.shown[turn][threadIdx.x / 32]  = shown;
                memory_.hidden[turn][threadIdx.x / 32] = hidden;
            }
        }
        __syncthreads();
    }

    // What a chunk's first use wants in registers. Behind it a stage may be written again if values are there, too.
    __device__ __forceinline__ void take(int first) {
        if (stage::is_used) {
            stage::wait();
        }
        ask_for_keys(first);
        if (is_ahead) {
            ask_for_values(first);
        }
        if (stage::is_used && is_ahead) {
            __syncthreads();
        }
    }

    __device__ __forceinline__ void ask_for_keys(int first) {
        scores_.load([&](int i) { return stage::is_used ? stage_.key(i) : k_.at(min(first + i, a_.n_cells - 1)); });
    }
    __device__ __forceinline__ void ask_for_values(int first) {
        values_.load([&](int i) { return stage::is_used ? stage_.value(i) : v_.at(min(first + i, a_.n_cells - 1)); });
    }

    // a lane compares a row
    __device__ __forceinline__ bool rows_see_alike() const {
        static_assert(n_pairs <= 32, "a warp has a lane for each row");
        const int  lane    = threadIdx.x % 32;
        const bool differs = memory_.seen[min(lane, memory_.n_of_rows - 1)] != memory_.seen[0];
        return __ballot_sync(0xffffffff, differs) == 0;
    }

    const attention_arguments &          a_;
    block_memory<size, n_sets> &         memory_;
    int                                  stream_;
    strided_rows                         k_, v_;
    stage                                stage_;
    attention_scores<type, size, n_sets> scores_;
    attention_weights<size, n_sets>      weights_;
    attention_values<type, size, n_sets> values_;
};

} // namespace dw::layer_parts
