// The feed-forward half of a layer on CUDA: layer-parts.h. Four kernels: router and norm, choice, gate and up, down;
// of one row the third makes the choice. Of
// a batch each expert that a row chose is read once. A kernel starts while the one before it ends.

#include "ops/door/launch.h"
#include "ops/layer-parts/networks.cuh"

#include <algorithm>

namespace {

using namespace dw::layer_parts;
namespace of = dw::layer_parts::experts;

constexpr int outputs_of_a_block = 4;

// Outputs [first, first + outputs_of_a_block) of pairs [p0, p0 + n_columns) into `out` [pairs][outputs_of_a_block].
template <ggml_type type, int n_columns>
__device__ __forceinline__ void lower(const group & g, int p0, int first, int lane, float * out) {
    constexpr int at_once = n_columns == 1 ? outputs_of_a_block : 2;
    column        columns[n_columns];
#pragma unroll
    for (int c = 0; c < n_columns; ++c) {
        columns[c] = g.all.hidden.of(g.pair(min(p0 + c, g.n_pairs - 1)));
    }
#pragma unroll 1
    for (int m0 = 0; m0 < outputs_of_a_block; m0 += at_once) {
        const char * rows[at_once];
        float        sums[at_once][n_columns] = {};
#pragma unroll
        for (int m = 0; m < at_once; ++m) {
            rows[m] = g.of.down.row(g.expert, first + m0 + m);
        }
        add_dots<type>(sums, rows, columns, g.of.down.width, lane);
        add_lanes(sums);
#pragma unroll
        for (int m = 0; m < at_once; ++m) {
#pragma unroll
            for (int c = 0; c < n_columns; ++c) {
                if (lane == m * n_columns + c && p0 + c < g.n_pairs) {
                    out[g.pair(p0 + c) * outputs_of_a_block + m0 + m] = sums[m][c];
                }
            }
        }
    }
}

// dst = x + the weighted sum of down hidden. Blocks: a few outputs; a warp a group.
template <bool is_single> __global__ void __launch_bounds__(512, 2)
    lower_all(arguments a, const float * x, int64_t x_stride, float * dst, int64_t dst_stride) {
    extern __shared__ float found[]; // [pairs][outputs_of_a_block]
    ggml_cuda_pdl_lc();
    const int warp = threadIdx.x / 32, n_warps = blockDim.x / 32, lane = threadIdx.x % 32;
    const int first = blockIdx.x * outputs_of_a_block;
    if (warp == 0) {
        prefetch(a.shared.down.row(0, first), outputs_of_a_block * (int) a.shared.down.row_stride, lane);
    }
    ggml_cuda_pdl_sync();
    const int n_groups = a.chosen->n_groups;
    for (int index = warp - 1; index < n_groups; index += n_warps) {
        const group g(a, index);
        for (int p0 = 0; p0 < g.n_pairs; p0 += most_columns) {
            with_type(g.of.down.type, [&](auto type) {
                with_columns<is_single>(min(most_columns, g.n_pairs - p0), [&](auto columns) {
                    lower<decltype(type)::value, decltype(columns)::value>(g, p0, first, lane, found);
                });
            });
        }
    }
    __syncthreads();
    const int n_ranks = a.n_used + 1;
    for (int i = threadIdx.x; i < a.n * outputs_of_a_block; i += blockDim.x) {
        const int row = i / outputs_of_a_block, output = i % outputs_of_a_block;
        float     sum = 0.0f;
        for (int pair = row * n_ranks; pair < (row + 1) * n_ranks; ++pair) {
            sum = fmaf(a.chosen->weights[pair], found[pair * outputs_of_a_block + output], sum);
        }
        dst[row * dst_stride + first + output] = x[row * x_stride + first + output] + sum;
    }
}

// of rows that hold either network's; a multiple of what loads of 16 bytes need
int64_t width_of_hidden(const ggml_tensor * dst) {
    return GGML_PAD(std::max(dst->src[of::down]->ne[0], dst->src[of::shared_down]->ne[0]), 64);
}

// Where things lie in the workspace.
struct layout {
    size_t logits, h, hidden, chosen, end;

    explicit layout(const ggml_tensor * dst) {
        const int64_t n = dst->ne[1], n_experts = dst->src[of::router]->ne[1];
        size_t        at   = 0;
        const auto    next = [&](size_t bytes) {
            const size_t begin = at;
            at += (bytes + 127) / 128 * 128;
            return begin;
        };
        logits = next((size_t) (n * (n_experts + 1)) * sizeof(float));
        h      = next(activations::bytes(n, dst->ne[0]));
        hidden = next(activations::bytes(n * (settings_of(dst).n_used + 1), width_of_hidden(dst)));
        chosen = next(sizeof(routes));
        end    = at;
    }
};

size_t workspace(const ggml_tensor * dst) {
    return layout(dst).end;
}

bool is_weights(const ggml_tensor * t, int64_t width, int64_t n_rows, int64_t n_experts) {
    return is_product_type(t->type) && t->ne[0] == width && t->ne[1] >= n_rows && t->ne[2] == n_experts &&
           width % ggml_blck_size(t->type) == 0;
}

bool takes(const ggml_tensor * dst) {
    const auto *        src       = dst->src;
    const ggml_tensor * x         = src[of::x];
    const settings      with      = settings_of(dst);
    const int64_t       width     = dst->ne[0];
    const int64_t       n_experts = src[of::router]->ne[1], n_hidden = src[of::down]->ne[0];
    const int64_t       n_shared = src[of::shared_down]->ne[0];
    const bool          is_sized = width % 32 == 0 && width <= max_width && dst->ne[1] >= 1 && dst->ne[1] <= max_rows &&
                          n_hidden % 32 == 0 && n_shared % 32 == 0 && n_experts <= max_experts && with.n_used >= 1 &&
                          with.n_used <= max_used && with.n_used <= n_experts && ggml_are_same_shape(x, dst);
    const bool are_rows = dw::is_f32(x) && dw::is_f32(dst) && x->nb[1] % 16 == 0 && dst->nb[1] % 4 == 0 &&
                          dw::is_f32(src[of::norm]) && ggml_nelements(src[of::norm]) == width;
    const bool are_routed = is_float(src[of::router]->type) && src[of::router]->ne[0] == width &&
                            ggml_is_contiguous(src[of::router]) && src[of::shared_router]->ne[0] == width &&
                            src[of::shared_router]->type == src[of::router]->type &&
                            ggml_nelements(src[of::shared_router]) == width;
    return is_sized && are_rows && are_routed &&
           is_weights(src[of::gate], width, n_hidden * (with.is_joint ? 2 : 1), n_experts) &&
           is_weights(src[of::up], width, n_hidden, n_experts) && src[of::up]->type == src[of::gate]->type &&
           is_weights(src[of::down], n_hidden, width, n_experts) &&
           is_weights(src[of::shared_gate], width, n_shared, 1) && is_weights(src[of::shared_up], width, n_shared, 1) &&
           src[of::shared_up]->type == src[of::shared_gate]->type &&
           is_weights(src[of::shared_down], n_shared, width, 1);
}

template <ggml_type type>
void launch_router(const ggml_tensor * dst, float * logits, const activations & h, cudaStream_t stream) {
    const auto * src       = dst->src;
    const int    n_experts = (int) src[of::router]->ne[1];
    ggml_cuda_kernel_launch(route<type>, { dim3(n_experts + 1), dim3(threads_for(dst->ne[0])), 0, stream },
                            dw::data_of<const float>(src[of::x]), dw::stride_of(src[of::x], 1), (int) dst->ne[1],
                            dw::data_of<const float>(src[of::norm]), settings_of(dst).epsilon,
                            (const void *) src[of::router]->data, (const void *) src[of::shared_router]->data, logits,
                            h);
}

template <bool is_single> void launch_networks(const arguments & a, const ggml_tensor * dst, cudaStream_t stream) {
    const ggml_tensor * x        = dst->src[of::x];
    const int           n_pairs  = a.n * (a.n_used + 1);
    const int           n_groups = std::min<int>(a.n * a.n_used, (int) dst->src[of::router]->ne[1]);
    const int64_t       widest   = std::max(a.routed.width, a.shared.width);
    ggml_cuda_kernel_launch(
        hide_all<is_single>,
        { dim3(dw::n_blocks(widest, hidden_of_a_block), n_groups + 1), dim3(32 * hidden_warps), 0, stream }, a);
    ggml_cuda_kernel_launch(lower_all<is_single>,
                            { dim3((unsigned) (dst->ne[0] / outputs_of_a_block)), dim3(32 * std::min(16, n_groups + 1)),
                              (int) (n_pairs * outputs_of_a_block * sizeof(float)), stream },
                            a, dw::data_of<const float>(x), dw::stride_of(x, 1), dw::data_of<float>(dst),
                            dw::stride_of(dst, 1));
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const auto *    src = dst->src;
    const settings  to  = settings_of(dst);
    const layout    at(dst);
    char *          memory   = (char *) with.workspace;
    const int       n        = (int) dst->ne[1];
    float *         logits   = (float *) (memory + at.logits);
    routes *        chosen   = (routes *) (memory + at.chosen);
    const int64_t   n_hidden = src[of::down]->ne[0], n_shared = src[of::shared_down]->ne[0];
    const arguments a = { { matrix::from(src[of::gate]), matrix::from(src[of::up]), matrix::from(src[of::down]),
                            to.is_joint ? (int) n_hidden : 0, (int) n_hidden },
                          { matrix::from(src[of::shared_gate]), matrix::from(src[of::shared_up]),
                            matrix::from(src[of::shared_down]), 0, (int) n_shared },
                          n == 1 ? logits : nullptr,
                          (int) src[of::router]->ne[1],
                          chosen,
                          activations::in(memory + at.h, n, dst->ne[0]),
                          activations::in(memory + at.hidden, n * (to.n_used + 1), width_of_hidden(dst)),
                          n,
                          to.n_used };
    switch (src[of::router]->type) {
        case GGML_TYPE_F32:
            launch_router<GGML_TYPE_F32>(dst, logits, a.h, with.stream);
            break;
        case GGML_TYPE_F16:
            launch_router<GGML_TYPE_F16>(dst, logits, a.h, with.stream);
            break;
        default:
            launch_router<GGML_TYPE_BF16>(dst, logits, a.h, with.stream);
    }
    if (n == 1) {
        return launch_networks<true>(a, dst, with.stream);
    }
    ggml_cuda_kernel_launch(choose, { dim3(1), dim3(32 * n), 0, with.stream }, (const float *) logits,
                            (int) src[of::router]->ne[1], to.n_used, chosen);
    launch_networks<false>(a, dst, with.stream);
}

} // namespace

const dw::op_descriptor dw::layer_parts::experts::on_cuda = { of::signature, nullptr, takes, workspace, launch };
