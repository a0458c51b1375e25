// How a block finds the K best tokens of a row whose groups' greatest logits are known: top-rows.cu. Each team of
// groups puts up its best. None of a row's K best is worse than the K-th of these, the bound: groups and tokens that
// are worse fall out, and few are left to be ranked. Must not know: kernels.
// Test: tests/ops/test_top_rows.py, tests/gpu/test_tree_ops_cuda.py.

#pragma once

#include "ops/top-rows/keys.cuh"
#include "ops/top-rows/top-rows.h"

namespace dw::top_rows {

constexpr int group_size     = 64; // logits, neighbours
constexpr int groups_of_part = 4;
constexpr int part_size      = groups_of_part * group_size; // of a warp

constexpr int n_threads      = 256; // of a row's block
constexpr int n_warps        = n_threads / 32;
constexpr int n_teams        = 128; // twice as many as wanted tokens: that few more than K are left
constexpr int lanes_of_team  = n_threads / n_teams;
constexpr int teams_of_warp  = n_teams / n_warps;
constexpr int n_listed       = 512;                                // most groups, and tokens, that a block keeps
constexpr int most_held      = max_vocab / group_size / n_threads; // groups of a thread, and bits of a word
constexpr int groups_at_once = 96; // that a block reads again: for 64 wanted tokens some 90 are listed
static_assert(n_teams >= 2 * max_k && most_held <= 64 && max_vocab / group_size <= 1 << 16);

// of a part of a row: its greatest logit, and the sum of exponentials under it
struct partial {
    float max, sum;
};

// what warps leave of all rows, in the workspace
struct partials {
    uint32_t * orders; // [R][parts][groups_of_part], of a group's greatest logit
    partial *  sums;   // [R][parts]
};

// A row, and what warps left of it.
struct parted_row {
    const float *    logits;
    const uint32_t * orders; // of this row, as in partials; so are sums
    const partial *  sums;
    int              n_vocab, n_parts;

    __device__ __forceinline__ int n_groups() const { return (n_vocab + group_size - 1) / group_size; }
};

// What may be among a row's best, in shared memory.
struct choice {
    alignas(16) token_key keys[n_listed];
    alignas(16) uint32_t put_up[n_teams]; // orders
    float    sums[n_threads];
    uint16_t groups[n_listed];
    uint32_t best, bound; // of all logits; of the K best or worse
    int      n_groups, n_keys;

    // All threads.
    __device__ __forceinline__ void begin() {
        begin_keys();
        if (threadIdx.x == 0) {
            best     = 0;
            bound    = 0xffffffff;
            n_groups = 0;
        }
    }
    // Behind the last key are some that are worse than any.
    __device__ __forceinline__ void begin_keys() {
        for (int i = threadIdx.x; i < n_listed; i += n_threads) {
            keys[i] = 0;
        }
        if (threadIdx.x == 0) {
            n_keys = 0;
        }
    }
    // Whether tokens are missing that may be among the best. Bound 0: too few teams have a number.
    __device__ __forceinline__ bool is_incomplete() const {
        return bound == 0 || n_groups > n_listed || n_keys > n_listed;
    }
};

// The groups of a thread, and its share of sums. Groups of a team are far from each other: good tokens are often
// neighbours, and many teams should have some.
template <int n_held> struct held_groups {
    uint32_t orders[n_held];
    partial  sums[n_held / groups_of_part];
    int      first, n_groups;

    __device__ __forceinline__ held_groups(const parted_row & row) :
        first(threadIdx.x / 32 * teams_of_warp + threadIdx.x % teams_of_warp +
              threadIdx.x % 32 / teams_of_warp * n_teams),
        n_groups(row.n_groups()) {
        const uint32_t * of_thread = kept(row.orders + first);
#pragma unroll
        for (int i = 0; i < n_held; ++i) {
            orders[i] = i * n_threads < n_groups - first ? __ldcg(of_thread + i * n_threads) : 0;
        }
        const float2 * in = kept((const float2 *) row.sums + threadIdx.x);
#pragma unroll
        for (int i = 0; i < n_held / groups_of_part; ++i) {
            const bool   is_in = i * n_threads < row.n_parts - (int) threadIdx.x;
            const float2 read  = is_in ? __ldcg(in + i * n_threads) : make_float2(-INFINITY, 0.0f);
            sums[i]            = { read.x, read.y };
        }
    }

    // of the team
    __device__ __forceinline__ uint32_t best() const {
        uint32_t found = 0;
#pragma unroll
        for (int i = 0; i < n_held; ++i) {
            found = max(found, orders[i]);
        }
#pragma unroll
        for (int offset = teams_of_warp; offset < 32; offset *= 2) {
            found = max(found, __shfl_xor_sync(0xffffffff, found, offset));
        }
        return found;
    }

    // Leaves the groups that may have one of the best.
    __device__ __forceinline__ void list(choice & s) const {
        uint64_t left = 0; // bit i: the i-th; few are
#pragma unroll
        for (int i = 0; i < n_held; ++i) {
            left |= (uint64_t) (i * n_threads < n_groups - first && orders[i] >= s.bound) << i;
        }
        int at = left != 0 ? atomicAdd(&s.n_groups, __popcll(left)) : 0;
        for (; left != 0 && at < n_listed; left &= left - 1) {
            s.groups[at++] = (uint16_t) (first + (__ffsll((long long) left) - 1) * n_threads);
        }
    }

    __device__ __forceinline__ void leave_sum(choice & s) const {
        const float max = max_of(s.best);
        float       sum = 0.0f;
#pragma unroll
        for (int i = 0; i < n_held / groups_of_part; ++i) {
            sum += sums[i].sum * expf(below(sums[i].max, max));
        }
        s.sums[threadIdx.x] = sum;
    }
};

__device__ __forceinline__ int sum_of_team(int x) {
#pragma unroll
    for (int offset = 1; offset < lanes_of_team; offset *= 2) {
        x += __shfl_xor_sync(0xffffffff, x, offset);
    }
    return x;
}

// The K-th best of what teams put up, and the best. So many tokens at least are not worse.
__device__ __forceinline__ void find_bound(choice & s, int k, uint32_t of_team) {
    if (threadIdx.x % 32 < teams_of_warp) {
        s.put_up[threadIdx.x / 32 * teams_of_warp + threadIdx.x % 32] = of_team;
    }
    __syncthreads();
    const uint32_t mine = s.put_up[threadIdx.x / lanes_of_team];
    int            rank = 0; // equals have the same
#pragma unroll
    for (int i = 0; i < n_teams / 4 / lanes_of_team; ++i) {
        const uint4 four = ((const uint4 *) s.put_up)[i * lanes_of_team + threadIdx.x % lanes_of_team];
        rank += (four.x > mine) + (four.y > mine) + (four.z > mine) + (four.w > mine);
    }
    rank                 = sum_of_team(rank);
    const uint32_t bound = min_of_lanes(rank < k ? mine : 0xffffffff), best = max_of_lanes(mine);
    if (threadIdx.x % 32 == 0) {
        atomicMin(&s.bound, bound);
        atomicMax(&s.best, best);
    }
    __syncthreads();
}

// values[at], which stay in registers
template <int n> __device__ __forceinline__ float pick(const float (&values)[n], int at) {
    if constexpr (n == 1) {
        return values[0];
    } else {
        float half[(n + 1) / 2];
#pragma unroll
        for (int i = 0; i < (n + 1) / 2; ++i) {
            half[i] = at % 2 && 2 * i + 1 < n ? values[min(2 * i + 1, n - 1)] : values[2 * i];
        }
        return pick(half, at / 2);
    }
}

// Logits of listed groups on their way to a warp.
struct asked_groups {
    static constexpr int n = groups_at_once / n_warps, each = group_size / 32;
    float                values[n * each];
    int                  first, lane;

    __device__ __forceinline__ asked_groups(const choice & s, const float * logits, int n_vocab, int from) :
        first(from),
        lane(threadIdx.x % 32) {
        const int     listed  = min(s.n_groups, n_listed);
        const float * of_lane = kept(logits + lane);
#pragma unroll
        for (int i = 0; i < n; ++i) {
            const int     at = first + i * n_warps;
            const int     id = at < listed ? s.groups[at] * group_size : n_vocab; // of lane 0
            const float * in = kept(of_lane + id);
#pragma unroll
            for (int j = 0; j < each; ++j) {
                values[i * each + j] = id + j * 32 < n_vocab - lane ? __ldcg(in + j * 32) : NAN;
            }
        }
    }

    // Leaves the tokens that are not under the bound; none if that is NaN.
    __device__ __forceinline__ void list(choice & s, int n_vocab) const {
        const float bound = logit_of(s.bound);
        uint32_t    left  = 0;
#pragma unroll
        for (int i = 0; i < n * each; ++i) {
            left |= (uint32_t) (values[i] >= bound) << i;
        }
        int at = left != 0 ? atomicAdd(&s.n_keys, __popc(left)) : 0;
        for (; left != 0 && at < n_listed; left &= left - 1) {
            const int which = __ffs((int) left) - 1;
            const int id    = s.groups[first + which / each * n_warps] * group_size + which % each * 32 + lane;
            s.keys[at++]    = key_of(order_of(pick(values, which)), id);
        }
    }
};

// Leaves the tokens of listed groups that may be among the best; and, while these come, the sum of the thread's parts.
template <int n_held>
__device__ __forceinline__ void list_tokens(choice & s, const parted_row & row, const held_groups<n_held> & groups) {
    int first = threadIdx.x / 32;
    do {
        const asked_groups asked(s, row.logits, row.n_vocab, first);
        if (first < n_warps) {
            groups.leave_sum(s);
        }
        asked.list(s, row.n_vocab);
        first += asked.n * n_warps;
    } while (first < min(s.n_groups, n_listed));
}

// f(rank, token, logit) of the k best that are listed, each by one thread. tokens: nullptr, or what ids stand for
template <typename F>
__device__ __forceinline__ void each_ranked(const choice & s, int k, const int32_t * tokens, F f) {
    constexpr int at_once = 8, of_chunk = at_once * lanes_of_team; // pairs of keys
    static_assert(n_listed % (2 * of_chunk) == 0, "chunks end with the list");
    const int lane = threadIdx.x % lanes_of_team, n = min(s.n_keys, n_listed);
#pragma unroll 1
    for (int first = 0; first < n; first += n_teams) {
        const int       at    = first + threadIdx.x / lanes_of_team;
        const token_key key   = s.keys[at];
        int32_t         token = (int32_t) id_of(key);
        if (tokens && at < n && lane == 0) {
            token = __ldcg(tokens + token);
        }
        int better[2] = {}; // two counts, which do not wait for each other
#pragma unroll 1
        for (int chunk = lane; 2 * chunk < n; chunk += of_chunk) {
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const ulonglong2 two = ((const ulonglong2 *) s.keys)[chunk + i * lanes_of_team];
                better[0] += two.x > key;
                better[1] += two.y > key;
            }
        }
        const int rank = sum_of_team(better[0] + better[1]);
        if (at < n && lane == 0 && rank < k) {
            f(rank, token, logit_of(order_in(key)));
        }
    }
}

} // namespace dw::top_rows
