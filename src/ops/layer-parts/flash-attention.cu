// Attention of few rows on CUDA: layer-parts.h. Two kernels: parts of the cells (attention-tile.cuh), and their sum.

#include "ops/layer-parts/attention-tile.cuh"

namespace {

using namespace dw::layer_parts;
namespace op = dw::layer_parts::flash_attention;

constexpr int most_parts = 1024;

// blocks: (tile of a stream, head of keys, part): those that read the same cells run together
template <int size> __global__ void __launch_bounds__(32 * warps_of_a_tile)
    attend(const __grid_constant__ attention_arguments a) {
    __shared__ block_memory<size> memory;
    ggml_cuda_pdl_lc();
    attention_tile<size> tile(a, memory);
    tile.find_paths();
    ggml_cuda_pdl_sync();
    tile.load_queries();
    const attention_part part = attention_part::of(blockIdx.z);
    for (int i = 0; i < part.n && (part.first + i) * chunk < a.n_cells; ++i) {
        tile.add((part.first + i) * chunk);
    }
    tile.write(blockIdx.z);
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
        if (!(weight == 0.0f)) { // NaN is passed on
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
            weights == 0.0f ? 0.0f : values / weights;
    }
}

template <int size> void launch_for(const attention_arguments & a, int n_parts, int n_streams, cudaStream_t stream) {
    const int n_tiles = attention_tile<size>::n_tiles(a);
    ggml_cuda_kernel_launch(
        attend<size>,
        { dim3(n_tiles * n_streams, a.n_heads / a.group, n_parts), dim3(32 * warps_of_a_tile), 0, stream }, a);
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
    return is_attention_size(size) && dw::is_f32(dst) && ggml_is_contiguous(dst) && dw::is_f32(q) &&
           ((uintptr_t) q->data | q->nb[1] | q->nb[2] | q->nb[3]) % 16 == 0 && q->ne[0] == size && q->ne[1] == n &&
           q->ne[2] == dst->ne[1] && q->ne[3] == dst->ne[3] && is_cache(src[op::k], size, dst) &&
           is_cache(src[op::v], size, dst) && src[op::k]->ne[1] == src[op::v]->ne[1] &&
           src[op::k]->ne[2] == src[op::v]->ne[2] && mask->type == GGML_TYPE_F16 && mask->nb[0] == sizeof(half) &&
           mask->ne[0] == src[op::k]->ne[1] && mask->ne[1] >= n && mask->ne[2] == 1 && mask->ne[3] == dst->ne[3] &&
           n >= 1 && n * dst->ne[3] <= max_rows && dw::ptx::has_products() &&
           n_attention_parts(src[op::k]->ne[1]) <= most_parts &&
           (!tree || (dw::is_i32(tree) && tree->ne[0] >= n * dst->ne[3] && tree->ne[1] == 4));
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const auto *        src = dst->src;
    const ggml_tensor * q = src[op::q], *tree = src[op::tree];
    attention_arguments a = {};
    a.q                   = dw::data_of<const char>(q);
    a.q_row               = (int64_t) q->nb[1];
    a.q_head              = (int64_t) q->nb[2];
    a.q_stream            = (int64_t) q->nb[3];
    a.k                   = half_rows::from(src[op::k]);
    a.v                   = half_rows::from(src[op::v]);
    a.mask                = half_rows::from(src[op::mask]);
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
