// dw_tree_conv_windows and dw_tree_commit_conv on CUDA: tree-ops.h. Copies, bound by memory.

#include "ops/door/launch.h"
#include "ops/tree-delta-net/tree-ops.h"

namespace windows = dw::tree_conv_windows;
namespace commit  = dw::tree_commit_conv;

namespace {

constexpr int n_threads = 256;

// width: of the windows, or 0: any
template <int width> __global__ void tree_conv_windows(const float * x, int64_t x_row, const float * states,
                                                       int64_t cell, const int32_t * cells, const int32_t * parents,
                                                       float * windows, int n_channels, int any_width, int n_nodes) {
    const int c   = blockIdx.x * n_threads + threadIdx.x;
    const int row = blockIdx.y;
    if (c >= n_channels) {
        return;
    }
    const int     n      = width > 0 ? width : any_width;
    const float * state  = states + cells[row / n_nodes] * cell + (int64_t) c * (n - 1);
    float *       window = windows + ((int64_t) row * n_channels + c) * n;
    float         seen[width > 0 ? width : 1];
    int           node = row;
    int           old  = n - 2; // newest column of the state that is not used yet
#pragma unroll
    for (int w = n - 1; w >= 0; --w) {
        const float value = node >= 0 ? x[node * x_row + c] : state[old--];
        node              = node >= 0 ? parents[node] : -1;
        if constexpr (width > 0) {
            seen[w] = value;
        } else {
            window[w] = value;
        }
    }
    if constexpr (width == 4) {
        *(float4 *) window = make_float4(seen[0], seen[1], seen[2], seen[3]);
    }
}

// strides in values
struct conv_states {
    float * data;
    int64_t channel, layer;
};
struct conv_inputs {
    const float * data;
    int64_t       channel, row, layer;
};

// grid: channels, layer
__global__ void tree_commit_conv(const conv_states states, const conv_inputs in, const int32_t * path, int n_kept,
                                 int n_channels) {
    const int c = blockIdx.x * n_threads + threadIdx.x;
    if (c >= n_channels) {
        return;
    }
    float *       state  = states.data + blockIdx.y * states.layer + c * states.channel;
    const float * x      = in.data + blockIdx.y * in.layer + c * in.channel;
    const int     n_path = path[0];
    for (int w = 0; w < n_kept; ++w) {     // none is overwritten before its turn
        const int p = n_path - n_kept + w; // of the path; under 0: an old input
        state[w]    = p >= 0 ? x[path[1 + p] * in.row] : state[n_kept + p];
    }
}

bool takes_windows(const ggml_tensor * dst) {
    return dw::is_f32(dst->src[windows::x]) && dw::is_f32(dst->src[windows::states]) &&
           dw::is_i32(dst->src[windows::cells]) && dw::is_i32(dst->src[windows::tree]) && ggml_is_contiguous(dst);
}

void launch_windows(const dw::launch_context & with, ggml_tensor * dst) {
    const ggml_tensor * x      = dst->src[windows::x];
    const ggml_tensor * states = dst->src[windows::states];
    const ggml_tensor * cells  = dst->src[windows::cells];
    const int           width  = (int) dst->ne[0];
    const dim3          grid(dw::n_blocks(dst->ne[1], n_threads), (unsigned) dst->ne[2]);
    const auto          kernel = width == 4 ? tree_conv_windows<4> : tree_conv_windows<0>;
    kernel<<<grid, n_threads, 0, with.stream>>>(dw::data_of<float>(x), dw::stride_of(x, 1), dw::data_of<float>(states),
                                                dw::stride_of(states, 1), dw::data_of<int32_t>(cells),
                                                dw::data_of<int32_t>(dst->src[windows::tree]), dw::data_of<float>(dst),
                                                (int) dst->ne[1], width, (int) (dst->ne[2] / cells->ne[0]));
}

bool takes_commit(const ggml_tensor * dst) {
    return dw::is_f32(dst) && dst->src[commit::x]->type == GGML_TYPE_F32 && dw::is_i32(dst->src[commit::path]);
}

void launch_commit(const dw::launch_context & with, ggml_tensor * dst) {
    const ggml_tensor * x      = dst->src[commit::x];
    const conv_states   states = { dw::data_of<float>(dst), dw::stride_of(dst, 1), dw::stride_of(dst, 2) };
    const conv_inputs   in = { dw::data_of<float>(x), dw::stride_of(x, 0), dw::stride_of(x, 1), dw::stride_of(x, 2) };
    const dim3          grid(dw::n_blocks(dst->ne[1], n_threads), (unsigned) dst->ne[2]);
    tree_commit_conv<<<grid, n_threads, 0, with.stream>>>(states, in, dw::data_of<int32_t>(dst->src[commit::path]),
                                                          (int) dst->ne[0], (int) dst->ne[1]);
}

} // namespace

const dw::op_descriptor windows::on_cuda = { windows::signature, nullptr, takes_windows, nullptr, launch_windows };
const dw::op_descriptor commit::on_cuda  = { commit::signature, nullptr, takes_commit, nullptr, launch_commit };
