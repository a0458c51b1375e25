// The feed-forward half of a layer on CUDA: layer-parts.h. Four kernels: router and norm, choice, gate and up, down; of
// one row the last two choose for themselves. Of a batch each expert that a row chose is read once. A kernel starts
// while the one before it ends.

#include "ops/door/launch.h"
#include "ops/layer-parts/networks.cuh"

#include <algorithm>
#include <climits>

namespace {

using namespace dw::layer_parts;
namespace of = dw::layer_parts::experts;

constexpr int outputs_of_a_block = tile_rows;
constexpr int most_lower_warps   = 16;

// Where the kernel finds what it sums up: outputs of pairs, [pairs][outputs_of_a_block].
__device__ __forceinline__ float & output_of(float * found, int pair, int output) {
    return found[pair * outputs_of_a_block + output];
}

// The groups of a warp: the first has the shared expert, the others share the routed ones.
struct groups_of_warp {
    int first, step, n;

    __device__ __forceinline__ groups_of_warp(int warp, int n_warps, int n_groups) :
        first(warp - 1),
        step(warp == 0 ? 1 : n_warps - 1),
        n(warp == 0 ? 1 : (n_groups - first + step - 1) / step) {}
    __device__ __forceinline__ int of(int i) const { return first + i * step; }
};

// Outputs [first, first + outputs_of_a_block) of a group, of float weights.
template <ggml_type type, int n_columns>
__device__ __forceinline__ void lower_floats(const group & g, int first, int lane, float * found) {
    constexpr int at_once = 2;
    for (int p0 = 0; p0 < g.n_pairs; p0 += n_columns) {
        const float * columns[n_columns];
#pragma unroll
        for (int c = 0; c < n_columns; ++c) {
            columns[c] = g.all.hidden.row(g.pair(min(p0 + c, g.n_pairs - 1)));
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
                        output_of(found, g.pair(p0 + c), m0 + m) = sums[m][c];
                    }
                }
            }
        }
    }
}

// Outputs [first, first + outputs_of_a_block) of this warp's groups, of quantised weights. group_of(i) is its group i.
template <ggml_type type, int n_columns, typename group_type> __device__ __forceinline__ void
lower_tiles(int n_groups, int width, int first, char * slots, int n_slots, float * found, group_type && group_of) {
    const int  lane     = threadIdx.x % 32;
    const int  n_pieces = tiled<type>::n_pieces(width); // of a group
    const auto rows_of  = [&](const group & g) {
        return strip{ g.of.down.row(g.expert, first), g.of.down.row_stride, tile_rows - 1, width };
    };
    const auto piece_of = [&](int i) {
        return rows_of(group_of(i / n_pieces)).template piece<type>(i % n_pieces * tiled<type>::n_values);
    };
    const piece_queue<type, decltype(piece_of)> queue(slots, n_slots, n_groups * n_pieces, piece_of);
    ggml_cuda_pdl_sync();
    for (int i = 0; i < n_groups; ++i) {
        const group g = group_of(i);
        with_columns_of_tile<n_columns>(g.n_pairs, [&](auto columns) {
            sums_of<decltype(columns)::value> sums(g.all.hidden, lane,
                                                   [&](int c) { return g.pair(min(c, g.n_pairs - 1)); });
            for (int k = 0; k < n_pieces; ++k) {
                const int at = i * n_pieces + k, value = k * tiled<type>::n_values;
                multiply_piece<type>(sums, queue.await(at), rows_of(g).template piece<type>(value), value, lane);
                queue.release(at);
            }
            sums.each([&](int column, int row, float sum) {
                if (column < g.n_pairs) {
                    output_of(found, g.pair(column), row) = sum;
                }
            });
        });
    }
}

// dst = x + the weighted sum of down hidden. Blocks: outputs_of_a_block outputs. The choice is older than the kernel
// before this one, which let it start: weights of experts are on their way before that one ends.
template <int n_columns> __global__ void __launch_bounds__(32 * most_lower_warps, 1)
    lower_all(arguments a, tile_plan plan, const float * x, int64_t x_stride, float * dst, int64_t dst_stride) {
    constexpr bool    is_single = n_columns == 1;
    extern __shared__ __align__(16) char memory[];
    __shared__ choice_of_row             own;
    ggml_cuda_pdl_lc();
    const int warp = threadIdx.x / 32, n_warps = blockDim.x / 32, lane = threadIdx.x % 32;
    const int first = blockIdx.x * outputs_of_a_block;
    float *   found = (float *) (memory + n_warps * plan.slots_of_a_warp);
    if (is_single) {
        if (warp == 0) {
            choose_row(a.logits, a.n_experts, a.n_used, lane, own.experts, own.weights);
        }
        __syncthreads();
    }
    const groups_of_warp mine(warp, n_warps, is_single ? a.n_used : a.chosen->n_groups);
    const auto           group_of = [&](int i) {
        const int index = mine.of(i);
        return index < 0   ? group(a, index, 0, a.n)
                         : is_single ? group(a, index, own.experts[index], 1)
                                     : group(a, index, a.chosen->experts[index], a.chosen->n_pairs[index]);
    };
    const network & of = warp == 0 ? a.shared : a.routed;
    with_type(of.down.type, [&](auto type_is) {
        constexpr ggml_type type = decltype(type_is)::value;
        if constexpr (are_floats<type>) {
            ggml_cuda_pdl_sync();
            for (int i = 0; i < mine.n; ++i) {
                const group g = group_of(i);
                with_columns<is_single>(min(g.n_pairs, most_columns), [&](auto columns) {
                    lower_floats<type, decltype(columns)::value>(g, first, lane, found);
                });
            }
        } else {
            lower_tiles<type, n_columns>(mine.n, of.down.width, first, memory + warp * plan.slots_of_a_warp,
                                         plan.n_slots, found, group_of);
        }
    });
    __syncthreads();
    const float * weights = is_single ? own.weights : a.chosen->weights;
    const int     n_ranks = a.n_used + 1;
    for (int i = threadIdx.x; i < a.n * outputs_of_a_block; i += blockDim.x) {
        const int row = i / outputs_of_a_block, output = i % outputs_of_a_block;
        float     sum = 0.0f;
        for (int rank = 0; rank < n_ranks; ++rank) {
            sum = fmaf(weights[row * n_ranks + rank], output_of(found, row * n_ranks + rank, output), sum);
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
           width % ggml_blck_size(t->type) == 0 && (is_float(t->type) || has_tile_products());
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

template <int n_columns> void launch_lower(const arguments & a, ggml_tensor * dst, int n_groups, cudaStream_t stream) {
    const ggml_tensor * x        = dst->src[of::x];
    const int           n_warps  = std::min(most_lower_warps, n_groups + 1);
    const ggml_type     types[]  = { a.routed.down.type, a.shared.down.type };
    const bool          has_many = n_groups + 1 > n_warps; // a warp has several groups
    const int           n_values = has_many ? INT_MAX : std::max(a.routed.width, a.shared.width);
    const tile_launch   with(types, 2, n_values, n_warps, sizeof(float) * a.n * (a.n_used + 1) * outputs_of_a_block);
    CUDA_SET_SHARED_MEMORY_LIMIT(lower_all<n_columns>, shared_memory_of_block());
    ggml_cuda_kernel_launch(
        lower_all<n_columns>,
        { dim3((unsigned) (dst->ne[0] / outputs_of_a_block)), dim3(32 * n_warps), with.bytes, stream }, a, with.plan,
        dw::data_of<const float>(x), dw::stride_of(x, 1), dw::data_of<float>(dst), dw::stride_of(dst, 1));
}

void launch_networks(const arguments & a, ggml_tensor * dst, cudaStream_t stream) {
    const int n_groups = std::min(a.n * a.n_used, a.n_experts);
    launch_hidden(a, n_groups, stream);
    if (a.n == 1) {
        launch_lower<1>(a, dst, n_groups, stream);
    } else if (a.n <= 8) {
        launch_lower<8>(a, dst, n_groups, stream);
    } else {
        launch_lower<16>(a, dst, n_groups, stream);
    }
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
    if (n > 1) {
        ggml_cuda_kernel_launch(choose, { dim3(1), dim3(32 * n), 0, with.stream }, (const float *) logits,
                                (int) src[of::router]->ne[1], to.n_used, chosen);
    }
    launch_networks(a, dst, with.stream);
}

} // namespace

const dw::op_descriptor dw::layer_parts::experts::on_cuda = { of::signature, nullptr, takes, workspace, launch };
