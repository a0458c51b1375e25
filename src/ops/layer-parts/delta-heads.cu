// The beginning of a gated-delta-net layer's middle on CUDA: causal convolution, SiLU, and the norms of q and k, of
// windows, chains and trees (layer-parts.h). Each kernel starts while the one before it ends.
// Test: tests/gpu/test_layer_parts_cuda.py.

#include "ops/door/launch.h"
#include "ops/layer-parts/delta-cells.h"
#include "ops/layer-parts/rows.cuh"

namespace {

using namespace dw::layer_parts;

constexpr int chain_width = 4;   // W of delta_front
constexpr int max_size    = 256; // S of delta_heads: a thread a channel

// Where heads go: q, k and v one after another.
struct heads_layout {
    float * out;
    int     n_keys, n_heads, n; // n_heads: of q, k and v together
    float   epsilon;
};

// y, this thread's channel of a head before its SiLU, of row r. All threads of the block, which is one of a head.
__device__ __forceinline__ void finish_head(const heads_layout & of, int r, float y) {
    __shared__ float sums[max_size / 32];
    const int        size = blockDim.x, head = blockIdx.x;
    const int        part      = min(head / of.n_keys, 2); // q, k, v
    const int        n_of_part = part < 2 ? of.n_keys : of.n_heads - 2 * of.n_keys;
    y                          = silu(y);
    if (part < 2) {
        const float sum = sum_of_lanes(y * y);
        __syncthreads(); // of the row before
        if (threadIdx.x % 32 == 0) {
            sums[threadIdx.x / 32] = sum;
        }
        __syncthreads();
        y *= rsqrtf(sum_of_warps(sums, size / 32) / size + of.epsilon) * rsqrtf((float) size);
    }
    of.out[(int64_t) part * of.n_keys * size * of.n + ((int64_t) r * n_of_part + head - part * of.n_keys) * size +
           threadIdx.x] = y;
}

struct windows_of {
    const char * data;
    int64_t      nb0, nb1, nb2; // bytes
    int          n_of_a_sequence;
};

// blocks: (head, row); a thread a channel
__global__ void heads(windows_of a, const float * kernel, int64_t kernel_stride, int width, heads_layout of) {
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const int     r = blockIdx.y, c = blockIdx.x * blockDim.x + threadIdx.x;
    const char *  at = a.data + c * a.nb1 + r / a.n_of_a_sequence * a.nb2 + r % a.n_of_a_sequence * a.nb0;
    const float * w  = kernel + c * kernel_stride;
    float         y  = 0.0f;
    for (int j = 0; j < width; ++j) {
        y += *(const float *) (at + j * a.nb0) * w[j];
    }
    finish_head(of, r, y);
}

// blocks: head; a thread a channel
__global__ void front(const float * x, const float * states, int64_t stride, const int32_t * cells, float * target,
                      const float * kernel, int64_t kernel_stride, heads_layout of) {
    ggml_cuda_pdl_lc();
    const int c = blockIdx.x * blockDim.x + threadIdx.x, n_channels = gridDim.x * blockDim.x;
    float     w[chain_width], seen[chain_width];
#pragma unroll
    for (int j = 0; j < chain_width; ++j) {
        w[j] = kernel[c * kernel_stride + j];
    }
    const float * old = states + cells[0] * stride + (int64_t) c * (chain_width - 1); // cells: written before the graph
    dw::ptx::prefetch_l2(old);
    ggml_cuda_pdl_sync();
#pragma unroll
    for (int j = 0; j + 1 < chain_width; ++j) {
        seen[j + 1] = old[j];
    }
    for (int r = 0; r < of.n; ++r) {
        float y = 0.0f;
#pragma unroll
        for (int j = 0; j < chain_width; ++j) {
            seen[j] = j + 1 < chain_width ? seen[j + 1] : x[(int64_t) r * n_channels + c];
            y += seen[j] * w[j];
        }
        finish_head(of, r, y);
    }
#pragma unroll
    for (int j = 0; j + 1 < chain_width; ++j) { // the cell may be the one that was read, by this thread alone
        target[(int64_t) c * (chain_width - 1) + j] = seen[j + 1];
    }
}

// Inputs of the nodes of trees, and what a chain's state is to them.
struct tree_of {
    const float *   x;
    const float *   states;
    int64_t         stride; // of a cell, in values
    const int32_t * cells;
    const int32_t * parents;
    float *         kept;
    int             n_nodes; // of a sequence
};

// blocks: (head, row); a thread a channel. Tree, cells and states are read before the kernel waits. No node of a verify
// writes them. What wrote them has ended: the commit's kernels (tree-commit.cu) let no kernel start early, and the
// copies of a graph's inputs lie between.
// The next kernel is let go behind the wait. Earlier, its blocks would take the places of blocks of this one that have
// not begun.
__global__ void tree_heads(const tree_of a, const float * kernel, int64_t kernel_stride, heads_layout of) {
    const int     r = blockIdx.y, c = blockIdx.x * blockDim.x + threadIdx.x, n_channels = gridDim.x * blockDim.x;
    const float * old = a.states + a.cells[r / a.n_nodes] * a.stride + (int64_t) c * (chain_width - 1);
    float         w[chain_width], seen[chain_width];
    int           nodes[chain_width]; // -1: from the state
    int           node = r, n_old = chain_width - 1;
#pragma unroll
    for (int j = chain_width - 1; j >= 0; --j) {
        w[j]     = kernel[c * kernel_stride + j];
        nodes[j] = node;
        seen[j]  = node < 0 ? old[--n_old] : 0.0f;
        node     = node < 0 ? -1 : a.parents[node];
    }
    ggml_cuda_pdl_sync();
    ggml_cuda_pdl_lc();
    float y = 0.0f;
#pragma unroll
    for (int j = 0; j < chain_width; ++j) {
        seen[j] = nodes[j] < 0 ? seen[j] : a.x[(int64_t) nodes[j] * n_channels + c];
        y += seen[j] * w[j];
    }
    a.kept[(int64_t) r * n_channels + c] = seen[chain_width - 1];
    finish_head(of, r, y);
}

// size and n_keys fit a result of C channels
bool are_heads(const settings & with, const ggml_tensor * dst, int64_t n_channels, int64_t n) {
    return with.size % 32 == 0 && with.size >= 32 && with.size <= max_size && with.n_keys >= 1 &&
           n_channels % with.size == 0 && n_channels / with.size > 2 * with.n_keys && n >= 1 && n <= max_rows &&
           dw::is_f32(dst) && ggml_is_contiguous(dst) && dst->ne[0] == n * n_channels;
}

heads_layout layout_of(ggml_tensor * dst, int64_t n_channels) {
    const settings with = settings_of(dst);
    return { dw::data_of<float>(dst), with.n_keys, (int) n_channels / with.size, (int) (dst->ne[0] / n_channels),
             with.epsilon };
}

namespace heads_op {

namespace of = delta_heads;

bool takes(const ggml_tensor * dst) {
    const ggml_tensor *windows = dst->src[of::windows], *kernel = dst->src[of::kernel];
    return dw::is_f32(windows) && dw::is_f32(kernel) && windows->ne[1] == kernel->ne[1] &&
           are_heads(settings_of(dst), dst, windows->ne[1], (windows->ne[0] - kernel->ne[0] + 1) * windows->ne[2]);
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const ggml_tensor *windows = dst->src[of::windows], *kernel = dst->src[of::kernel];
    const heads_layout to    = layout_of(dst, windows->ne[1]);
    const int          width = (int) kernel->ne[0];
    ggml_cuda_kernel_launch(heads, { dim3(to.n_heads, to.n), dim3(settings_of(dst).size), 0, with.stream },
                            windows_of{ dw::data_of<const char>(windows), (int64_t) windows->nb[0],
                                        (int64_t) windows->nb[1], (int64_t) windows->nb[2],
                                        (int) windows->ne[0] - width + 1 },
                            dw::data_of<const float>(kernel), dw::stride_of(kernel, 1), width, to);
}

} // namespace heads_op

namespace front_op {

namespace of = delta_front;

bool takes(const ggml_tensor * dst) {
    const ggml_tensor *x = dst->src[of::x], *kernel = dst->src[of::kernel];
    return dw::is_f32(x) && ggml_is_contiguous(x) && dw::is_f32(kernel) && kernel->ne[0] == chain_width &&
           x->ne[0] == kernel->ne[1] && dw::is_i32(dst->src[of::cells]) &&
           dst->src[of::states]->ne[0] == (chain_width - 1) * x->ne[0] &&
           is_cell(dst->src[of::target], dst->src[of::states]) &&
           are_heads(settings_of(dst), dst, x->ne[0], x->ne[1] * x->ne[2]);
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const ggml_tensor *kernel = dst->src[of::kernel], *states = dst->src[of::states];
    const heads_layout to = layout_of(dst, kernel->ne[1]);
    ggml_cuda_kernel_launch(front, { dim3(to.n_heads), dim3(settings_of(dst).size), 0, with.stream },
                            dw::data_of<const float>(dst->src[of::x]), dw::data_of<const float>(states),
                            dw::stride_of(states, 1), dw::data_of<const int32_t>(dst->src[of::cells]),
                            dw::data_of<float>(dst->src[of::target]), dw::data_of<const float>(kernel),
                            dw::stride_of(kernel, 1), to);
}

} // namespace front_op

namespace tree_op {

namespace of = delta_tree;

bool takes(const ggml_tensor * dst) {
    const auto *       src = dst->src;
    const ggml_tensor *x = src[of::x], *kernel = src[of::kernel], *cells = src[of::cells], *kept = src[of::kept];
    const int64_t      n = ggml_nelements(x) / x->ne[0];
    return dw::is_f32(x) && ggml_is_contiguous(x) && dw::is_f32(kept) && ggml_is_contiguous(kept) &&
           ggml_nelements(kept) == ggml_nelements(x) && dw::is_f32(kernel) && kernel->ne[0] == chain_width &&
           kernel->ne[1] == x->ne[0] && dw::is_f32(src[of::states]) &&
           src[of::states]->ne[0] == (chain_width - 1) * x->ne[0] && dw::is_i32(cells) &&
           n % ggml_nelements(cells) == 0 && dw::is_i32(src[of::tree]) && src[of::tree]->ne[0] >= n &&
           are_heads(settings_of(dst), dst, x->ne[0], n);
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const auto *        src    = dst->src;
    const ggml_tensor * kernel = src[of::kernel];
    const heads_layout  to     = layout_of(dst, kernel->ne[1]);
    ggml_cuda_kernel_launch(tree_heads, { dim3(to.n_heads, to.n), dim3(settings_of(dst).size), 0, with.stream },
                            tree_of{ dw::data_of<const float>(src[of::x]), dw::data_of<const float>(src[of::states]),
                                     dw::stride_of(src[of::states], 1), dw::data_of<const int32_t>(src[of::cells]),
                                     dw::data_of<const int32_t>(src[of::tree]), dw::data_of<float>(src[of::kept]),
                                     to.n / (int) ggml_nelements(src[of::cells]) },
                            dw::data_of<const float>(kernel), dw::stride_of(kernel, 1), to);
}

} // namespace tree_op

} // namespace

namespace dw::layer_parts {
const op_descriptor delta_heads::on_cuda = { delta_heads::signature, nullptr, heads_op::takes, nullptr,
                                             heads_op::launch };
const op_descriptor delta_front::on_cuda = { delta_front::signature, nullptr, front_op::takes, nullptr,
                                             front_op::launch };
const op_descriptor delta_tree::on_cuda  = { delta_tree::signature, nullptr, tree_op::takes, nullptr, tree_op::launch };
} // namespace dw::layer_parts
