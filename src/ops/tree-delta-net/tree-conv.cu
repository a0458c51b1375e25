// dw_tree_conv_windows and dw_tree_commit_conv on CUDA: tree-ops.h. Copies, bound by memory.

#include "ops/door/launchers.h"

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

__global__ void tree_commit_conv(float * states, int64_t channel, const float * x, int64_t x_row, int64_t x_channel,
                                 const int32_t * path, int n_kept, int n_channels) {
    const int c = blockIdx.x * n_threads + threadIdx.x;
    if (c >= n_channels) {
        return;
    }
    float *   state  = states + c * channel;
    const int n_path = path[0];
    for (int w = 0; w < n_kept; ++w) {     // none is overwritten before its turn
        const int p = n_path - n_kept + w; // of the path; under 0: an old input
        state[w]    = p >= 0 ? x[path[1 + p] * x_row + c * x_channel] : state[n_kept + p];
    }
}

} // namespace

bool dw::takes_tree_conv_windows(const ggml_tensor * dst) {
    return is_f32(dst->src[0]) && is_f32(dst->src[1]) && is_i32(dst->src[2]) && is_i32(dst->src[3]) &&
           ggml_is_contiguous(dst);
}

void dw::launch_tree_conv_windows(ggml_tensor * dst, void * stream) {
    const ggml_tensor * x      = dst->src[0];
    const ggml_tensor * states = dst->src[1];
    const ggml_tensor * cells  = dst->src[2];
    const int           width  = (int) dst->ne[0];
    const dim3          grid(n_blocks(dst->ne[1], n_threads), (unsigned) dst->ne[2]);
    const auto          kernel = width == 4 ? tree_conv_windows<4> : tree_conv_windows<0>;
    kernel<<<grid, n_threads, 0, (cudaStream_t) stream>>>(
        data_of<float>(x), stride_of(x, 1), data_of<float>(states), stride_of(states, 1), data_of<int32_t>(cells),
        data_of<int32_t>(dst->src[3]), data_of<float>(dst), (int) dst->ne[1], width, (int) (dst->ne[2] / cells->ne[0]));
}

bool dw::takes_tree_commit_conv(const ggml_tensor * dst) {
    return is_f32(dst) && dst->src[1]->type == GGML_TYPE_F32 && is_i32(dst->src[2]);
}

void dw::launch_tree_commit_conv(ggml_tensor * dst, void * stream) {
    const ggml_tensor * x = dst->src[1];
    tree_commit_conv<<<n_blocks(dst->ne[1], n_threads), n_threads, 0, (cudaStream_t) stream>>>(
        data_of<float>(dst), stride_of(dst, 1), data_of<float>(x), stride_of(x, 1), stride_of(x, 0),
        data_of<int32_t>(dst->src[2]), (int) dst->ne[0], (int) dst->ne[1]);
}
