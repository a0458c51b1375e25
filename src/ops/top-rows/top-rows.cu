// dw_top_rows on CUDA: top-rows.h. First each group of logits finds its greatest one, then a block a row the best of
// all (choice.cuh): only groups that may have one of these are read again.
//
// Both kernels can start while the product in front of them ends, where that leaves room: for 9 to 16 rows
// large-products.cuh leaves 16,384 registers of a multiprocessor and some of its shared memory, for fewer rows 4,096. A
// first pass brings instructions into caches; what it reads is arbitrary, and it writes nothing. Of several rows only
// the first blocks make it, since the others start late. Logits and partials are read from L2: a multiprocessor's own
// cache may hold what that pass read.

#include "ops/top-rows/top-rows.h"

#include "ops/door/chain.cuh"
#include "ops/door/launch.h"
#include "ops/top-rows/whole-row.cuh"

namespace dw::top_rows {

namespace {

constexpr int warps_of_block = 8;             // each a part
constexpr int held_of_few    = most_held / 4; // groups of a thread, in up to 262,144 logits

// grid: parts, row
__global__ void __launch_bounds__(32 * warps_of_block, 4)
    best_of_groups(const float * logits, int64_t row_stride, int n_vocab, int n_parts, partials to) {
    ggml_cuda_pdl_lc();
    const int row = blockIdx.y, lane = threadIdx.x % 32;
    const int part  = blockIdx.x * warps_of_block + threadIdx.x / 32;
    const int first = part * part_size + lane;
#pragma unroll 1
    for (int pass = row == 0 ? -1 : 0; pass < 1; ++pass) { // blocks of other rows start behind these
        if (pass == 0) {
            ggml_cuda_pdl_sync();
        }
        const float * in = kept(logits + row * row_stride + first);
        float         values[part_size / 32];
#pragma unroll
        for (int i = 0; i < part_size / 32; ++i) {
            values[i] = 32 * i < n_vocab - first ? __ldcg(in + 32 * i) : NAN;
        }
        uint32_t best = 0, mine = 0;
#pragma unroll
        for (int g = 0; g < groups_of_part; ++g) {
            const uint32_t of_group = max_of_lanes(greater_order(values[2 * g], values[2 * g + 1]));
            mine                    = lane == g ? of_group : mine;
            best                    = max(best, of_group);
        }
        const float max = max_of(best);
        const float sum = sum_of_lanes(sum_under(max, values));
        if (pass == 0 && part < n_parts) {
            const int64_t at = (int64_t) row * n_parts + part;
            if (lane < groups_of_part) {
                kept(to.orders)[at * groups_of_part + lane] = mine;
            }
            if (lane == 0) {
                kept(to.sums)[at] = { max, sum };
            }
        }
    }
}

// The logarithm of the sum of all exponentials, of what threads left. One warp.
__device__ __forceinline__ float log_of_sums(const choice & s) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < n_warps; ++i) {
        sum += s.sums[threadIdx.x % 32 + 32 * i];
    }
    return max_of(s.best) + logf(sum_of_lanes(sum));
}

// grid: row; tokens: nullptr, or what the ids stand for; n_held: groups of a thread
template <int n_held> __global__ void __launch_bounds__(n_threads, n_held <= held_of_few ? 4 : 1)
    best_of_rows(const float * logits, int64_t row_stride, int n_vocab, int n_parts, const partials from, int k,
                 const int32_t * tokens, float * out, int64_t out_stride) {
    __shared__ choice s;
    ggml_cuda_pdl_lc();
    const int64_t    at = (int64_t) blockIdx.x * n_parts;
    const parted_row row{ logits + blockIdx.x * row_stride, from.orders + at * groups_of_part, from.sums + at, n_vocab,
                          n_parts };
    const row_writer to(out + blockIdx.x * out_stride, k);
#pragma unroll 1
    for (int pass = gridDim.x == 1 ? -1 : 0; pass < 1; ++pass) {
        __syncthreads(); // the pass before is done
        s.begin();
        if (pass == 0) {
            ggml_cuda_pdl_sync();
        }
        const int                 n_best = pass == 0 ? k : 1;
        const held_groups<n_held> groups(row);
        find_bound(s, n_best, groups.best());
        groups.list(s);
        __syncthreads();
        list_tokens(s, row, groups);
        __syncthreads();
        if (pass == 0 && s.is_incomplete()) {
            list_all(s, row.logits, n_vocab, k);
        }
        if (threadIdx.x / 32 == n_warps - 1) { // has the fewest tokens to rank
            const float log_sum = log_of_sums(s);
            if (pass == 0 && threadIdx.x % 32 == 0) {
                to.sums(max_of(s.best), log_sum);
            }
        }
        each_ranked(s, n_best, tokens, [&](int rank, int32_t token, float logit) {
            if (pass == 0) {
                to.token(rank, token, logit);
            }
        });
    }
}

// in all rows
int64_t n_parts(const ggml_tensor * logits) {
    return logits->ne[1] * n_blocks(logits->ne[0], part_size);
}

size_t workspace(const ggml_tensor * dst) {
    return n_parts(dst->src[logits]) * (groups_of_part * sizeof(uint32_t) + sizeof(partial));
}

bool takes(const ggml_tensor * dst) {
    const ggml_tensor * of    = dst->src[logits];
    const ggml_tensor * named = dst->src[tokens];
    const int64_t       k     = k_of(dst->ne[0]);
    const bool          are_named =
        !named || (named->type == GGML_TYPE_I32 && ggml_is_contiguous(named) && ggml_nelements(named) == of->ne[0]);
    return are_named && is_f32(dst) && is_f32(of) && k >= 1 && k <= max_k && k <= of->ne[0] && of->ne[0] <= max_vocab &&
           of->ne[1] == dst->ne[1];
}

void launch(const launch_context & with, ggml_tensor * dst) {
    const ggml_tensor * of      = dst->src[logits];
    const ggml_tensor * named   = dst->src[tokens];
    const int           n_vocab = (int) of->ne[0], k = (int) k_of(dst->ne[0]);
    const unsigned      n_rows = (unsigned) of->ne[1], parts = n_blocks(n_vocab, part_size);
    uint32_t *          orders = (uint32_t *) with.workspace;
    const partials      between{ orders, (partial *) (orders + n_parts(of) * groups_of_part) };
    constexpr bool      keeps_shared = true; // as the product with a head does
    launch_kernel<best_of_groups, keeps_shared>(
        { dim3(n_blocks(parts, warps_of_block), n_rows), dim3(32 * warps_of_block), 0, with.stream },
        data_of<const float>(of), stride_of(of, 1), n_vocab, (int) parts, between);
    const auto finish = [&](auto n_held) {
        launch_kernel<best_of_rows<decltype(n_held)::value>, keeps_shared>(
            { dim3(n_rows), dim3(n_threads), 0, with.stream }, data_of<const float>(of), stride_of(of, 1), n_vocab,
            (int) parts, between, k, named ? data_of<const int32_t>(named) : nullptr, data_of<float>(dst),
            stride_of(dst, 1));
    };
    if (parts * groups_of_part <= held_of_few * n_threads) {
        finish(std::integral_constant<int, held_of_few>{});
    } else {
        finish(std::integral_constant<int, most_held>{});
    }
}

} // namespace

const op_descriptor on_cuda = { signature, nullptr, takes, workspace, launch };

} // namespace dw::top_rows
