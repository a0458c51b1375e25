// dw_top_rows on CUDA: top-rows.h. First each part of a row finds its best tokens, then each row the best of those.
//
// How a block finds the K best of many: each of at least 2 K groups of threads puts up the best that it has. None of
// the K best can be worse than the K-th of these; what is worse falls out, and few are left to be ranked.

#include "ops/top-rows/top-rows.h"

#include "ops/door/launch.h"
#include "ops/top-rows/keys.cuh"

namespace dw::top_rows {

namespace {

constexpr int n_threads    = 256;
constexpr int part_size    = (int) top_rows::part_size;
constexpr int per_thread   = part_size / n_threads; // bits of a word, too
constexpr int n_candidates = 4096;                  // most that can be left, see takes()

struct selection {
    token_key put_up[n_threads];
    token_key candidates[n_candidates];
    token_key best, bound;
    int       n;
};

// how many of n keys are better than one
__device__ int rank_of(token_key key, const token_key * keys, int n) {
    int rank = 0;
#pragma unroll 8
    for (int i = 0; i < n; ++i) {
        rank += keys[i] > key;
    }
    return rank;
}

// Leaves in `s` the best key, and candidates among which the k best are; all threads of a block. mine: this thread's
// best key. each(bound, f): f of those of its keys that are not under the bound.
template <typename Each> __device__ void select(selection & s, int k, token_key mine, Each each) {
    int n_groups = 32;
    while (n_groups < 2 * k) {
        n_groups *= 2;
    }
    const int size = n_threads / n_groups; // of a group: 2, 4 or 8
    for (int offset = size / 2; offset > 0; offset /= 2) {
        mine = better(mine, __shfl_xor_sync(0xffffffff, mine, offset));
    }
    if (threadIdx.x % size == 0) {
        s.put_up[threadIdx.x / size] = mine;
    }
    if (threadIdx.x == 0) {
        s.best  = 0;
        s.bound = 1; // where there are less than k
        s.n     = 0;
    }
    __syncthreads();
    mine = threadIdx.x < n_groups ? s.put_up[threadIdx.x] : 0;
    if (mine != 0) {
        const int rank = rank_of(mine, s.put_up, n_groups);
        if (rank == 0) {
            s.best = mine;
        }
        if (rank == k - 1) {
            s.bound = mine;
        }
    }
    __syncthreads();
    each(s.bound, [&](token_key key) { s.candidates[atomicAdd(&s.n, 1)] = key; });
    __syncthreads();
}

// f(rank, key) of the k best candidates, each by one thread; key 0 where there are fewer
template <typename F> __device__ void each_of_best(const selection & s, int k, F f) {
    for (int i = threadIdx.x; i < s.n; i += n_threads) {
        const int rank = rank_of(s.candidates[i], s.candidates, s.n);
        if (rank < k) {
            f(rank, s.candidates[i]);
        }
    }
    for (int rank = s.n + threadIdx.x; rank < k; rank += n_threads) {
        f(rank, (token_key) 0);
    }
}

// what a part of a row leaves: keys [R][K][parts], so that the best of all parts come first, then sums [R][parts]
struct partial {
    float max, sum;
};

// in the workspace
struct partials {
    token_key * keys;
    partial *   sums;
};

// grid: part, row
__global__ void __launch_bounds__(n_threads, 4)
    top_of_parts(const float * logits, int64_t row_stride, int n_vocab, int k, partials to) {
    __shared__ selection s;
    __shared__ float     sums[n_threads / 32];
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const int     part = blockIdx.x, row = blockIdx.y, n_parts = gridDim.x;
    const int     first = part * part_size + threadIdx.x;
    const float * in    = logits + row * row_stride;
    uint32_t      orders[per_thread];
    uint32_t      best = 0;
    int           at   = 0;
#pragma unroll
    for (int i = 0; i < per_thread; ++i) {
        const int id = first + i * n_threads;
        orders[i]    = id < n_vocab ? __float_as_uint(in[id]) : 0xffffffff; // a NaN
    }
#pragma unroll
    for (int i = 0; i < per_thread; ++i) {
        orders[i] = order_of(__uint_as_float(orders[i]));
        at        = orders[i] > best ? i : at;
        best      = orders[i] > best ? orders[i] : best;
    }
    const token_key mine = first < n_vocab ? key_of(best, first + at * n_threads) : 0;
    select(s, k, mine, [&](token_key bound, auto f) {
        uint32_t left = 0; // bit i: the i-th; few are
#pragma unroll
        for (int i = 0; i < per_thread; ++i) {
            left |= (uint32_t) (orders[i] >= order_of(bound)) << i;
        }
        for (; left != 0; left &= left - 1) {
            const int id = first + (__ffs((int) left) - 1) * n_threads;
            if (id < n_vocab && key_of(order_of(in[id]), id) >= bound) {
                f(key_of(order_of(in[id]), id));
            }
        }
    });
    const float max = max_of(s.best);
    float       sum = 0.0f;
#pragma unroll
    for (int i = 0; i < per_thread; ++i) {
        sum += expf(orders[i] ? below(logit_of(orders[i]), max) : -INFINITY);
    }
    sum = sum_of_lanes(sum);
    if (threadIdx.x % 32 == 0) {
        sums[threadIdx.x / 32] = sum;
    }
    each_of_best(s, k, [&](int rank, token_key key) { to.keys[((int64_t) row * k + rank) * n_parts + part] = key; });
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < n_threads / 32; ++w) {
            sum += sums[w];
        }
        to.sums[row * n_parts + part] = { max, sum };
    }
}

// grid: row; tokens: nullptr, or what the ids stand for
__global__ void __launch_bounds__(n_threads)
    top_of_rows(const partials from, int n_parts, int k, const int32_t * tokens, float * out, int64_t out_stride) {
    __shared__ selection s;
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const int                  row    = blockIdx.x;
    const int                  n_keys = n_parts * k;
    const token_key *          keys   = from.keys + (int64_t) row * n_keys;
    const partial *            parts  = from.sums + (int64_t) row * n_parts;
    const top_rows::row_writer to(out + row * out_stride, k);
    token_key                  mine = 0;
    for (int i = threadIdx.x; i < n_keys; i += n_threads) {
        mine = better(mine, keys[i]);
    }
    select(s, k, mine, [&](token_key bound, auto f) {
        for (int i = threadIdx.x; i < n_keys; i += n_threads) {
            if (keys[i] >= bound) {
                f(keys[i]);
            }
        }
    });
    if (threadIdx.x < 32) { // the sums meanwhile
        const float max = max_of(s.best);
        float       sum = 0.0f;
        for (int p = threadIdx.x; p < n_parts; p += 32) {
            sum += parts[p].sum * expf(below(parts[p].max, max));
        }
        sum = sum_of_lanes(sum);
        if (threadIdx.x == 0) {
            to.sums(max, max + logf(sum));
        }
    }
    each_of_best(s, k, [&](int rank, token_key key) {
        const int32_t id = (int32_t) id_of(key);
        to.token(rank, tokens ? tokens[id] : id, logit_of(order_of(key)));
    });
}

size_t n_keys(const ggml_tensor * logits, int64_t k) {
    return (size_t) (logits->ne[1] * k * top_rows::n_parts(logits->ne[0]));
}

size_t workspace(const ggml_tensor * dst) {
    const ggml_tensor * logits = dst->src[top_rows::logits];
    return n_keys(logits, top_rows::k_of(dst->ne[0])) * sizeof(token_key) + n_keys(logits, 1) * sizeof(partial);
}

// A row's keys fall to n_threads threads, and only those of k groups can be left: n_candidates hold them.
bool takes(const ggml_tensor * dst) {
    const ggml_tensor * logits = dst->src[top_rows::logits];
    const ggml_tensor * tokens = dst->src[top_rows::tokens];
    const int64_t       k      = top_rows::k_of(dst->ne[0]);
    const bool          named  = !tokens || (tokens->type == GGML_TYPE_I32 && ggml_is_contiguous(tokens) &&
                                   ggml_nelements(tokens) == logits->ne[0]);
    return named && is_f32(dst) && is_f32(logits) && k >= 1 && k <= top_rows::max_k && k <= logits->ne[0] &&
           top_rows::n_parts(logits->ne[0]) <= top_rows::max_parts && logits->ne[1] == dst->ne[1];
}

void launch(const launch_context & with, ggml_tensor * dst) {
    const ggml_tensor * logits  = dst->src[top_rows::logits];
    const int64_t       k       = top_rows::k_of(dst->ne[0]);
    const int64_t       n_parts = top_rows::n_parts(logits->ne[0]);
    const int64_t       n_rows  = logits->ne[1];
    token_key *         keys    = (token_key *) with.workspace;
    const partials      between = { keys, (partial *) (keys + n_keys(logits, k)) };
    const ggml_tensor * named   = dst->src[top_rows::tokens];
    ggml_cuda_kernel_launch(top_of_parts,
                            { dim3((unsigned) n_parts, (unsigned) n_rows), dim3(n_threads), 0, with.stream },
                            data_of<const float>(logits), stride_of(logits, 1), (int) logits->ne[0], (int) k, between);
    ggml_cuda_kernel_launch(top_of_rows, { dim3((unsigned) n_rows), dim3(n_threads), 0, with.stream }, between,
                            (int) n_parts, (int) k, named ? data_of<const int32_t>(named) : nullptr,
                            data_of<float>(dst), stride_of(dst, 1));
}

} // namespace

const op_descriptor on_cuda = { signature, nullptr, takes, workspace, launch };

} // namespace dw::top_rows
