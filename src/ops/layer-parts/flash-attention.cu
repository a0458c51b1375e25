// Attention of few rows on CUDA: layer-parts.h. Two kernels: parts of the cells (attention-tile.cuh), and their sum.

#include "ops/layer-parts/attention-tile.cuh"
#include "ops/layer-parts/dots.cuh"

namespace {

using namespace dw::layer_parts;
namespace op = dw::layer_parts::flash_attention;

constexpr int most_parts = 1024, least_cells_of_two_sets = 4096;

// blocks: (tile of a stream, head of keys, part): those that read the same cells run together, the largest parts first
template <int size, int n_sets> __global__ void __launch_bounds__(32 * warps_of_a_tile<size>, 2)
    attend(const __grid_constant__ attention_arguments a) {
    __shared__ block_memory<size, n_sets> memory;
    ggml_cuda_pdl_lc();
    const int                    at    = gridDim.z - 1 - blockIdx.z;
    const attention_part         part  = attention_part::of(at);
    const int                    first = part.first * chunk;
    attention_tile<size, n_sets> tile(a, memory);
    tile.prepare(first);
    ggml_cuda_pdl_sync();
    tile.begin(first);
    const int end = min(first + part.n * chunk, a.n_cells);
    for (int cell = first;; tile.go_on(cell)) {
        const int next = cell + chunk;
        tile.add(cell, next < end);
        if (next >= end) {
            break;
        }
        cell = next;
    }
    tile.write(at);
}

constexpr int quads_of_a_join = 16, n_classes_of_parts = 16, threads_of_a_join = quads_of_a_join * n_classes_of_parts;

__device__ __forceinline__ float4 add(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// What the sums of each part count, and the sum of its weights. All threads of a block.
__device__ __forceinline__ void weigh_parts(float2 (&to)[most_parts], const float2 * ends, int stride, int n_parts) {
    __shared__ float of_warps[threads_of_a_join / 32];
    float            most = -INFINITY;
    for (int part = threadIdx.x; part < n_parts; part += threads_of_a_join) {
        to[part] = ends[(int64_t) part * stride];
        most     = fmaxf(most, to[part].x);
    }
    most = most_of_lanes(most);
    if (threadIdx.x % 32 == 0) {
        of_warps[threadIdx.x / 32] = most;
    }
    __syncthreads();
    for (int i = 0; i < threads_of_a_join / 32; ++i) {
        most = fmaxf(most, of_warps[i]);
    }
    for (int part = threadIdx.x; part < n_parts; part += threads_of_a_join) {
        to[part].x = to[part].x > -INFINITY ? expf(to[part].x - most) : 0.0f;
    }
    __syncthreads();
}

// blocks: (pair, stream, 64 values of it). Parts are added up in 16 classes, then these.
__global__ void __launch_bounds__(threads_of_a_join)
    join(const __grid_constant__ attention_arguments a, int n_parts, int size) {
    __shared__ float2 parts[most_parts];
    __shared__ float4 sums[n_classes_of_parts][quads_of_a_join];
    __shared__ float  weights[n_classes_of_parts];
    ggml_cuda_pdl_lc();
    const int     quad = threadIdx.x % quads_of_a_join, which = threadIdx.x / quads_of_a_join;
    const int     value = (blockIdx.z * quads_of_a_join + quad) * 4;
    const int64_t first = (int64_t) blockIdx.y * n_parts * a.n_pairs() + blockIdx.x;
    ggml_cuda_pdl_sync();
    weigh_parts(parts, a.ends + first, a.n_pairs(), n_parts);
    float4 sum    = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float  weight = 0.0f;
#pragma unroll 4
    for (int part = which; part < n_parts; part += n_classes_of_parts) {
        const float4 x      = *(const float4 *) &a.sums[(first + (int64_t) part * a.n_pairs()) * size + value];
        const float  share  = parts[part].x;
        const bool   counts = !(share == 0.0f); // NaN is passed on
        sum.x               = counts ? fmaf(share, x.x, sum.x) : sum.x;
        sum.y               = counts ? fmaf(share, x.y, sum.y) : sum.y;
        sum.z               = counts ? fmaf(share, x.z, sum.z) : sum.z;
        sum.w               = counts ? fmaf(share, x.w, sum.w) : sum.w;
        weight              = counts ? fmaf(share, parts[part].y, weight) : weight;
    }
    sums[which][quad] = sum;
    weights[which]    = weight;
    for (int n = n_classes_of_parts / 2; n > 0; n /= 2) {
        __syncthreads();
        if (which < n) {
            sums[which][quad] = add(sums[which][quad], sums[which + n][quad]);
            if (quad == 0) {
                weights[which] += weights[which + n];
            }
        }
    }
    if (which == 0) {
        __syncwarp(0xffff);
        const float4 x = sums[0][quad];
        const float  w = weights[0];
        *(float4 *) &a.out[((int64_t) blockIdx.y * a.n_pairs() + blockIdx.x) * size + value] =
            w == 0.0f ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : make_float4(x.x / w, x.y / w, x.z / w, x.w / w);
    }
}

template <int size, int n_sets>
void launch_for(const attention_arguments & a, int n_parts, int n_streams, cudaStream_t stream) {
    const int n_tiles = attention_tile<size, n_sets>::n_tiles(a);
    ggml_cuda_kernel_launch(
        attend<size, n_sets>,
        { dim3(n_tiles * n_streams, a.n_heads / a.group, n_parts), dim3(32 * warps_of_a_tile<size>), 0, stream }, a);
    ggml_cuda_kernel_launch(
        join, { dim3(a.n_pairs(), n_streams, size / (4 * quads_of_a_join)), dim3(threads_of_a_join), 0, stream }, a,
        n_parts, size);
}

// Two sets of pairs read each cell once, and wait longer for the first.
template <int size> void launch_for(const attention_arguments & a, int n_parts, int n_streams, cudaStream_t stream) {
    const bool by_two = a.n_rows * a.group > pairs_of_a_set && a.n_cells >= least_cells_of_two_sets;
    return by_two ? launch_for<size, 2>(a, n_parts, n_streams, stream)
                  : launch_for<size, 1>(a, n_parts, n_streams, stream);
}

bool is_cache(const ggml_tensor * t, int64_t size, const ggml_tensor * dst) {
    const size_t odd = (uintptr_t) t->data | t->nb[1] | t->nb[2] | t->nb[3];
    return t->type == GGML_TYPE_F16 && t->nb[0] == sizeof(half) && odd % 16 == 0 && t->ne[0] == size &&
           t->nb[1] <= INT_MAX && t->ne[3] == dst->ne[3] && dst->ne[1] % t->ne[2] == 0;
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
    return is_attention_size(size) && dw::is_f32(dst) && ggml_is_contiguous(dst) && dw::is_f32(q) &&
           ((uintptr_t) q->data | q->nb[1] | q->nb[2] | q->nb[3]) % 16 == 0 && q->ne[0] == size && q->ne[1] == n &&
           q->ne[2] == dst->ne[1] && q->ne[3] == dst->ne[3] && is_cache(src[op::k], size, dst) &&
           is_cache(src[op::v], size, dst) && src[op::k]->ne[1] == src[op::v]->ne[1] &&
           src[op::k]->ne[2] == src[op::v]->ne[2] && mask->type == GGML_TYPE_F16 && mask->nb[0] == sizeof(half) &&
           mask->ne[0] == src[op::k]->ne[1] && mask->ne[1] >= n && mask->ne[2] == 1 && mask->ne[3] == dst->ne[3] &&
           mask->nb[1] <= INT_MAX && n >= 1 && n * dst->ne[3] <= max_rows && dw::ptx::has_products() &&
           n_attention_parts(src[op::k]->ne[1]) <= most_parts &&
           (!tree || (dw::is_i32(tree) && tree->ne[0] >= n * dst->ne[3] && tree->ne[1] == 4));
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const auto *        src = dst->src;
    const ggml_tensor * q = src[op::q], *mask = src[op::mask], *tree = src[op::tree];
    attention_arguments a = {};
    a.q                   = dw::data_of<const char>(q);
    a.q_row               = (int64_t) q->nb[1];
    a.q_head              = (int64_t) q->nb[2];
    a.q_stream            = (int64_t) q->nb[3];
    a.k                   = half_rows::from(src[op::k]);
    a.v                   = half_rows::from(src[op::v]);
    a.mask                = half_rows::from(mask);
    a.masks_are_aligned   = ((uintptr_t) mask->data | mask->nb[1] | mask->nb[3]) % 8 == 0;
    a.tree                = tree ? dw::data_of<const int32_t>(tree) : nullptr;
    a.tree_rows           = tree ? (int) tree->ne[0] : 0;
    a.n_rows              = (int) dst->ne[2];
    a.n_cells             = (int) src[op::k]->ne[1];
    a.n_heads             = (int) dst->ne[1];
    a.group               = (int) (dst->ne[1] / src[op::k]->ne[2]);
    a.scale               = settings_of(dst).scale;
    a.ends                = (float2 *) with.workspace;
    a.sums                = (float *) ((char *) with.workspace + bytes_of_ends(dst));
    a.out                 = dw::data_of<float>(dst);
    const int n_parts = n_attention_parts(a.n_cells), n_streams = (int) dst->ne[3];
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
