// Attention of few rows on CUDA: layer-parts.h. Two kernels. A block of the first has 16 pairs of a row and a head that
// read the same keys, and a part of the cells; products run on tensor cores (mma.m16n8k16), of values of 16 bits with
// sums in f32. The second adds the parts up.
//
// Where a tree branches, a chunk that holds draft tokens is read for each row as plain decoding would have it: the k-th
// of the row's path from its own cell, in the k-th place. Then a row's pairs alone take part in a product.

#include "ops/door/launch.h"
#include "ops/door/ptx.cuh"
#include "ops/layer-parts/attention-parts.h"
#include "ops/layer-parts/dots.cuh"

namespace {

using namespace dw::layer_parts;
namespace op  = dw::layer_parts::flash_attention;
namespace ptx = dw::ptx;

constexpr int pairs_of_a_tile = 16, n_warps = 4, chunk = cells_of_a_chunk;
constexpr int rows_of_a_warp = pairs_of_a_tile / n_warps; // whose softmax it computes
constexpr int most_parts     = 1024;

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

// A row's path through a tree of drafts.
struct draft_path {
    int n; // 0: all lies where plain decoding has it
    int from[max_rows], to[max_rows];

    // the cell that is read for a place
    __device__ __forceinline__ int source(int place) const {
        int cell = place;
        for (int k = 0; k < n; ++k) {
            cell = to[k] == place ? from[k] : cell;
        }
        return cell;
    }
    // 1: yes, 0: no, -1: the mask says it
    __device__ __forceinline__ int sees(int place) const {
        int found = -1;
        for (int k = 0; k < n; ++k) {
            found = to[k] == place ? 1 : found < 0 && from[k] == place ? 0 : found;
        }
        return found;
    }
    __device__ __forceinline__ bool touches(int first) const {
        bool found = false;
        for (int k = 0; k < n; ++k) {
            found = found || (to[k] >= first && to[k] < first + chunk) || (from[k] >= first && from[k] < first + chunk);
        }
        return found;
    }
};

// What a block keeps in shared memory.
template <int size> struct block_memory {
    // Gaps let lanes meet different banks.
    __align__(16) half queries[pairs_of_a_tile][size + 32];
    __align__(16) float scores[pairs_of_a_tile][chunk + 8];
    __align__(16) half weights[pairs_of_a_tile][chunk + 8];
    float      most[pairs_of_a_tile], total[pairs_of_a_tile], factor[pairs_of_a_tile];
    int        sources[chunk];
    int        parents[max_rows], depths[max_rows], cells[max_rows]; // of the batch
    draft_path paths[pairs_of_a_tile];                               // by row of the tile
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
    static constexpr int n_steps  = size / 32;      // of 32 values of a key
    static constexpr int of_warp  = size / n_warps; // values of the result
    static constexpr int per_lane = of_warp / 8;    // of them, neighbours
    static constexpr int n_cuts   = chunk / 16;     // of a chunk's cells, 16 a product
    using values_of_chunk         = neighbours<per_lane>[n_cuts][4];

  public:
    __device__ __forceinline__ attention_tile(const attention_arguments & a, block_memory<size> & memory) :
        a_(a),
        memory_(memory),
        key_head_(blockIdx.y),
        first_pair_(blockIdx.z % n_tiles(a) * pairs_of_a_tile),
        stream_(blockIdx.z / n_tiles(a)),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32) {}

    static __host__ __device__ __forceinline__ int n_tiles(const attention_arguments & a) {
        return (a.n_rows * a.group + pairs_of_a_tile - 1) / pairs_of_a_tile;
    }

    // The paths of this tile's rows. Trees are written before the graph.
    __device__ __forceinline__ void find_paths() {
        const int n_batch = a_.n_rows * (int) (gridDim.z / n_tiles(a_));
        for (int i = threadIdx.x; a_.tree && i < n_batch; i += blockDim.x) {
            memory_.parents[i] = a_.tree[i];
            memory_.depths[i]  = a_.tree[a_.tree_rows + i];
            memory_.cells[i]   = a_.tree[3 * a_.tree_rows + i];
        }
        __syncthreads();
        if (threadIdx.x < pairs_of_a_tile) {
            draft_path & path = memory_.paths[threadIdx.x];
            const int    row  = first_row() + threadIdx.x;
            path.n            = 0;
            if (a_.tree && row <= last_row()) {
                find_path(path, stream_ * a_.n_rows + row);
            }
        }
        __syncthreads();
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
        const bool      by_row  = touches_paths(first);
        const int       n_turns = by_row ? last_row() - first_row() + 1 : 1;
        values_of_chunk values;
        float2          biases[rows_of_a_warp];
        load_biases(biases, first);
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
        for (int turn = 0; turn < n_turns; ++turn) {
            if (by_row) {
                find_sources(first, turn);
                load_values(values);
            }
            multiply_values(values, by_row ? turn : -1);
            __syncthreads();
        }
    }

    __device__ __forceinline__ void write(int part) const {
        const int64_t first = ((int64_t) stream_ * gridDim.x + part) * a_.n_pairs();
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
    __device__ __forceinline__ int last_row() const { return min(row_of(pairs_of_a_tile - 1), a_.n_rows - 1); }

    __device__ __forceinline__ void find_path(draft_path & path, int node) const {
        const int n    = memory_.depths[node] + 1;
        int       root = node;
        for (int k = n - 1; k >= 0; --k) {
            path.from[k] = memory_.cells[root];
            root         = k > 0 ? memory_.parents[root] : root;
        }
        bool is_straight = true;
        for (int k = 0; k < n; ++k) {
            path.to[k]  = memory_.cells[root + k];
            is_straight = is_straight && path.to[k] == path.from[k];
        }
        path.n = is_straight ? 0 : n;
    }

    __device__ __forceinline__ bool touches_paths(int first) const {
        bool found = false;
        for (int i = 0; i <= last_row() - first_row(); ++i) {
            found = found || memory_.paths[i].touches(first);
        }
        return found;
    }

    // of the tile's row `turn`
    __device__ __forceinline__ void find_sources(int first, int turn) {
        if (threadIdx.x < chunk) {
            const int place              = min(first + (int) threadIdx.x, a_.n_cells - 1);
            memory_.sources[threadIdx.x] = memory_.paths[turn].source(place);
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
        for (int half_of = 0; half_of < 2; ++half_of) {
            const int     begin = 16 * warp_ + 8 * half_of;
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

    __device__ __forceinline__ float bias(int pair, int place) const {
        if (place >= a_.n_cells || !is_there(pair)) {
            return -INFINITY;
        }
        const int sees = memory_.paths[row_of(pair) - first_row()].sees(place);
        return sees == 1 ? 0.0f : sees == 0 ? -INFINITY : __half2float(a_.mask.of(0, stream_).at(row_of(pair))[place]);
    }

    // of two places a lane, for the pairs whose softmax this warp computes
    __device__ __forceinline__ void load_biases(float2 (&to)[rows_of_a_warp], int first) const {
#pragma unroll
        for (int i = 0; i < rows_of_a_warp; ++i) {
            const int pair = rows_of_a_warp * warp_ + i;
            to[i]          = make_float2(bias(pair, first + lane_), bias(pair, first + lane_ + 32));
        }
    }

    // Weights of the chunk's cells, and what they make of the sums so far.
    __device__ __forceinline__ void weigh(const float2 (&biases)[rows_of_a_warp]) {
#pragma unroll
        for (int i = 0; i < rows_of_a_warp; ++i) {
            const int   pair   = rows_of_a_warp * warp_ + i;
            const float x      = memory_.scores[pair][lane_] + biases[i].x;
            const float y      = memory_.scores[pair][lane_ + 32] + biases[i].y;
            const float before = memory_.most[pair];
            const float most   = fmaxf(before, most_of_warp(fmaxf(x, y)));
            const bool  sees   = most > -INFINITY;
            const half  p = __float2half(sees ? expf(x - most) : 0.0f), q = __float2half(sees ? expf(y - most) : 0.0f);
            memory_.weights[pair][lane_]      = p;
            memory_.weights[pair][lane_ + 32] = q;
            const float sum                   = sum_of_lanes(__half2float(p) + __half2float(q));
            if (lane_ == 0) {
                const float factor   = sees ? expf(before - most) : 1.0f;
                memory_.factor[pair] = factor;
                memory_.most[pair]   = most;
                memory_.total[pair]  = memory_.total[pair] * factor + sum;
            }
        }
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

    // Weights of one row's pairs, or of all (-1), times values.
    __device__ __forceinline__ void multiply_values(const values_of_chunk & values, int row) {
        const auto takes_part = [&](int pair) { return row < 0 || row_of(pair) - first_row() == row; };
        const bool of_low = takes_part(lane_ / 4), of_high = takes_part(lane_ / 4 + 8);
#pragma unroll
        for (int cut = 0; cut < n_cuts; ++cut) {
            const uint32_t * low    = (const uint32_t *) &memory_.weights[lane_ / 4][16 * cut + lane_ % 4 * 2];
            const uint32_t * high   = (const uint32_t *) &memory_.weights[lane_ / 4 + 8][16 * cut + lane_ % 4 * 2];
            const uint32_t   both[] = { of_low ? low[0] : 0, of_high ? high[0] : 0, of_low ? low[4] : 0,
                                      of_high ? high[4] : 0 };
            const auto & of = values[cut];
#pragma unroll
            for (int j = 0; j < per_lane; ++j) {
                const uint32_t pick = j % 2 ? 0x7632 : 0x5410;
                ptx::multiply_16_bits(sums_[j], both,
                                      make_uint2(__byte_perm(of[0].words[j / 2], of[1].words[j / 2], pick),
                                                 __byte_perm(of[2].words[j / 2], of[3].words[j / 2], pick)));
            }
        }
    }

    const attention_arguments & a_;
    block_memory<size> &        memory_;
    int                         key_head_, first_pair_, stream_, warp_, lane_;
    float                       sums_[per_lane][4] = {};
};

// blocks: (part, head of keys, tile of a stream)
template <int size> __global__ void __launch_bounds__(32 * n_warps)
    attend(const __grid_constant__ attention_arguments a) {
    __shared__ block_memory<size> memory;
    ggml_cuda_pdl_lc();
    attention_tile<size> tile(a, memory);
    tile.find_paths();
    ggml_cuda_pdl_sync();
    tile.load_queries();
    const attention_part part = attention_part::of(blockIdx.x);
    for (int i = 0; i < part.n && (part.first + i) * chunk < a.n_cells; ++i) {
        tile.add((part.first + i) * chunk);
    }
    tile.write(blockIdx.x);
}

constexpr int values_of_a_join = 64, n_classes_of_parts = 4;

// blocks: (pair, stream, 64 values of it). Parts are added up in four classes, then these.
__global__ void join(const __grid_constant__ attention_arguments a, int n_parts, int size) {
    __shared__ float2 ends[most_parts];
    __shared__ float2 sums[n_classes_of_parts][values_of_a_join]; // of values, of weights
    ggml_cuda_pdl_lc();
    const int     i = threadIdx.x % values_of_a_join, which = threadIdx.x / values_of_a_join;
    const int     value = blockIdx.z * values_of_a_join + i;
    const int64_t first = (int64_t) blockIdx.y * n_parts * a.n_pairs() + blockIdx.x;
    ggml_cuda_pdl_sync();
    for (int part = threadIdx.x; part < n_parts; part += blockDim.x) {
        ends[part] = a.ends[first + (int64_t) part * a.n_pairs()];
    }
    __syncthreads();
    float most = -INFINITY;
    for (int part = 0; part < n_parts; ++part) {
        most = fmaxf(most, ends[part].x);
    }
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 4
    for (int part = which; part < n_parts; part += n_classes_of_parts) {
        const float weight = ends[part].x > -INFINITY ? expf(ends[part].x - most) : 0.0f;
        if (weight > 0.0f) {
            sum.x = fmaf(weight, a.sums[(first + (int64_t) part * a.n_pairs()) * size + value], sum.x);
            sum.y = fmaf(weight, ends[part].y, sum.y);
        }
    }
    sums[which][i] = sum;
    __syncthreads();
    if (which == 0) {
        const float values  = (sums[0][i].x + sums[1][i].x) + (sums[2][i].x + sums[3][i].x);
        const float weights = (sums[0][i].y + sums[1][i].y) + (sums[2][i].y + sums[3][i].y);
        a.out[((int64_t) blockIdx.y * a.n_pairs() + blockIdx.x) * size + value] =
            weights > 0.0f ? values / weights : 0.0f;
    }
}

template <int size> void launch_for(const attention_arguments & a, int n_parts, int n_streams, cudaStream_t stream) {
    const int n_tiles = attention_tile<size>::n_tiles(a);
    ggml_cuda_kernel_launch(
        attend<size>, { dim3(n_parts, a.n_heads / a.group, n_tiles * n_streams), dim3(32 * n_warps), 0, stream }, a);
    ggml_cuda_kernel_launch(join,
                            { dim3(a.n_pairs(), n_streams, size / values_of_a_join),
                              dim3(n_classes_of_parts * values_of_a_join), 0, stream },
                            a, n_parts, size);
}

bool is_cache(const ggml_tensor * t, int64_t size, const ggml_tensor * dst) {
    const size_t odd = (uintptr_t) t->data | t->nb[1] | t->nb[2] | t->nb[3];
    return t->type == GGML_TYPE_F16 && t->nb[0] == sizeof(half) && odd % 16 == 0 && t->ne[0] == size &&
           t->ne[3] == dst->ne[3] && dst->ne[1] % t->ne[2] == 0;
}

int64_t n_pairs_of(const ggml_tensor * dst) {
    return dst->ne[1] * dst->ne[2] * dst->ne[3];
}

size_t bytes_of_ends(const ggml_tensor * dst) {
    return GGML_PAD(sizeof(float2) * n_pairs_of(dst) * n_attention_parts(dst->src[op::k]->ne[1]), 128);
}

size_t workspace(const ggml_tensor * dst) {
    return bytes_of_ends(dst) +
           sizeof(float) * n_pairs_of(dst) * n_attention_parts(dst->src[op::k]->ne[1]) * dst->ne[0];
}

bool takes(const ggml_tensor * dst) {
    const auto *       src = dst->src;
    const ggml_tensor *q = src[op::q], *mask = src[op::mask], *tree = src[op::tree];
    const int64_t      size = dst->ne[0], n = dst->ne[2];
    return (size == 64 || size == 128 || size == 256) && dw::is_f32(dst) && ggml_is_contiguous(dst) && dw::is_f32(q) &&
           ((uintptr_t) q->data | q->nb[1] | q->nb[2] | q->nb[3]) % 16 == 0 && q->ne[0] == size && q->ne[1] == n &&
           q->ne[2] == dst->ne[1] && q->ne[3] == dst->ne[3] && is_cache(src[op::k], size, dst) &&
           is_cache(src[op::v], size, dst) && src[op::k]->ne[1] == src[op::v]->ne[1] &&
           src[op::k]->ne[2] == src[op::v]->ne[2] && mask->type == GGML_TYPE_F16 && mask->nb[0] == sizeof(half) &&
           mask->ne[0] == src[op::k]->ne[1] && mask->ne[1] >= n && mask->ne[2] == 1 && mask->ne[3] == dst->ne[3] &&
           n >= 1 && n * dst->ne[3] <= max_rows && ptx::has_products() &&
           n_attention_parts(src[op::k]->ne[1]) <= most_parts &&
           (!tree || (dw::is_i32(tree) && tree->ne[0] >= n * dst->ne[3] && tree->ne[1] == 4));
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const auto *              src = dst->src;
    const ggml_tensor *       q = src[op::q], *tree = src[op::tree];
    const attention_arguments a       = { dw::data_of<const char>(q),
                                          (int64_t) q->nb[1],
                                          (int64_t) q->nb[2],
                                          (int64_t) q->nb[3],
                                          half_rows::from(src[op::k]),
                                          half_rows::from(src[op::v]),
                                          half_rows::from(src[op::mask]),
                                    tree ? dw::data_of<const int32_t>(tree) : nullptr,
                                    tree ? (int) tree->ne[0] : 0,
                                          (int) dst->ne[2],
                                          (int) src[op::k]->ne[1],
                                          (int) dst->ne[1],
                                          (int) (dst->ne[1] / src[op::k]->ne[2]),
                                          settings_of(dst).scale,
                                          (float2 *) with.workspace,
                                          (float *) ((char *) with.workspace + bytes_of_ends(dst)),
                                          dw::data_of<float>(dst) };
    const int                 n_parts = n_attention_parts(a.n_cells), n_streams = (int) dst->ne[3];
    switch (dst->ne[0]) {
        case 64:
            return launch_for<64>(a, n_parts, n_streams, with.stream);
        case 128:
            return launch_for<128>(a, n_parts, n_streams, with.stream);
        default:
            return launch_for<256>(a, n_parts, n_streams, with.stream);
    }
}

} // namespace

namespace dw::layer_parts {
const op_descriptor flash_attention::on_cuda = { flash_attention::signature, nullptr, takes, workspace, launch };
} // namespace dw::layer_parts
