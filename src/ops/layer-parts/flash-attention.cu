// Attention of few rows on CUDA: layer-parts.h. Two kernels: parts of the cells (attention-tile.cuh), and their sum,
// which may gate heads and make them the input of a product.

#include "ops/door/chain.cuh"
#include "ops/layer-parts/attention-tile.cuh"
#include "ops/layer-parts/rows.cuh"

namespace {

using namespace dw::layer_parts;
namespace op = dw::layer_parts::flash_attention;

constexpr int most_parts = 1024, least_cells_of_two_sets = 4096;

// The part of a block: those of equal size in order, so that the ones with cells begin first, else the largest first.
__device__ __forceinline__ int part_of_block() {
    return gridDim.z <= n_smallest_parts ? blockIdx.z : gridDim.z - 1 - blockIdx.z;
}

// blocks: (tile of a stream, head of keys, part): those that read the same cells run together
template <int size, int n_sets> __global__ void __launch_bounds__(32 * warps_of_a_tile<size>, 2)
    attend(const __grid_constant__ attention_arguments a) {
    __shared__ block_memory<size, n_sets> memory;
    ggml_cuda_pdl_lc();
    const int                    at    = part_of_block();
    const attention_part         part  = attention_part::of(at);
    const int                    first = part.first * chunk;
    attention_tile<size, n_sets> tile(a, memory);
    const int                    end = tile.prepare(first, min(first + part.n * chunk, a.n_cells));
    ggml_cuda_pdl_sync();
    if (end == first) { // what is written may lie where a kernel before this one reads
        return tile.write_nothing(at);
    }
    tile.begin(first);
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

// of the lane that has the same four values
__device__ __forceinline__ float other_half(float x) {
    return __shfl_xor_sync(0xffffffff, x, quads_of_a_join);
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

// What heads are multiplied with, if `data` is there, and where they go then as the input of a product, if `to` is.
struct head_gates {
    const char *           data;
    int64_t                head, row; // strides in bytes
    activations::quantised to;

    __host__ __device__ __forceinline__ bool goes_on() const { return to.quants; }

    __device__ __forceinline__ float4 of(int h, int r, int value) const {
        return *(const float4 *) (data + h * head + r * row + value * sizeof(float));
    }
};

// Four values of a pair, and the weights that they count.
struct part_sum {
    float4 values = { 0.0f, 0.0f, 0.0f, 0.0f };
    float  weight = 0.0f;

    // part: its share, the sum of its weights
    __device__ __forceinline__ void add(float2 part, float4 x) {
        const bool counts = !(part.x == 0.0f); // NaN is passed on
        values.x          = counts ? fmaf(part.x, x.x, values.x) : values.x;
        values.y          = counts ? fmaf(part.x, x.y, values.y) : values.y;
        values.z          = counts ? fmaf(part.x, x.z, values.z) : values.z;
        values.w          = counts ? fmaf(part.x, x.w, values.w) : values.w;
        weight            = counts ? fmaf(part.x, part.y, weight) : weight;
    }
};

// Classes 0 or 1, and every second behind it, of values that lie `stride` apart.
template <typename value_type, typename add_type>
__device__ __forceinline__ value_type sum_of_classes(const value_type * from, int stride, add_type && add) {
    const auto at  = [&](int i) { return from[2 * i * stride]; };
    const auto two = [&](int i) { return add(at(i), at(i + 4)); };
    return add(add(two(0), two(2)), add(two(1), two(3)));
}

// Four values of a pair, of the sums of all classes: a lane and the one 16 behind it have half of the classes each. The
// first warp.
__device__ __forceinline__ float4 sum_of_all(const float4 * sums, const float * weights) {
    float4 x = sum_of_classes(sums + threadIdx.x, quads_of_a_join, add);
    float  w = sum_of_classes(weights + threadIdx.x / quads_of_a_join, 1, [](float a, float b) { return a + b; });
    x        = add(x, make_float4(other_half(x.x), other_half(x.y), other_half(x.z), other_half(x.w)));
    w += other_half(w);
    return w == 0.0f ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : make_float4(x.x / w, x.y / w, x.z / w, x.w / w);
}

// blocks: (pair, stream, 64 values of it). Parts are added up in 16 classes, then these. is_single: of one row, which
// keeps_shared (chain.cuh); that is an attribute of a function, so there are two of the same code.
template <bool is_single> __global__ void __launch_bounds__(threads_of_a_join)
    join(const __grid_constant__ attention_arguments a, int n_parts, int size, head_gates gates) {
    __shared__ float2 parts[most_parts];
    __shared__ float4 sums[threads_of_a_join];
    __shared__ float  weights[n_classes_of_parts];
    ggml_cuda_pdl_lc();
    const int     quad = threadIdx.x % quads_of_a_join, which = threadIdx.x / quads_of_a_join;
    const int     value = (blockIdx.z * quads_of_a_join + quad) * 4, head = blockIdx.x % a.n_heads;
    const int     row          = blockIdx.y * a.n_rows + blockIdx.x / a.n_heads;
    const int64_t first        = (int64_t) blockIdx.y * n_parts * a.n_pairs() + blockIdx.x;
    const auto    four_of_part = [&](int part) {
        return *(const float4 *) &a.sums[(first + (int64_t) part * a.n_pairs()) * size + value];
    };
    ggml_cuda_pdl_sync();
    // asked for before it is known what it counts
    const float4 ahead = four_of_part(min(which, n_parts - 1));
    const float4 gate  = gates.data && threadIdx.x < 32 ? gates.of(head, row, value) : ahead;
    weigh_parts(parts, a.ends + first, a.n_pairs(), n_parts);
    part_sum mine;
    if (which < n_parts) {
        mine.add(parts[which], ahead);
    }
#pragma unroll 4
    for (int part = which + n_classes_of_parts; part < n_parts; part += n_classes_of_parts) {
        if (!(parts[part].x == 0.0f)) { // of others nothing was written
            mine.add(parts[part], four_of_part(part));
        }
    }
    sums[threadIdx.x] = mine.values;
    if (quad == 0) {
        weights[which] = mine.weight;
    }
    __syncthreads();
    if (threadIdx.x >= 32) {
        return;
    }
    const float4 x = sum_of_all(sums, weights);
    if (which == 0) {
        *(float4 *) &a.out[((int64_t) row * a.n_heads + head) * size + value] = x;
    }
    if (gates.goes_on()) {
        gates.to.store(row, (head * size + value) / 4, gates.data ? gated(x, gate) : x, which == 0);
    }
}

void launch_join(const attention_arguments & a, int n_parts, int size, int n_streams, const head_gates & gates,
                 cudaStream_t stream) {
    const ggml_cuda_kernel_launch_params with = { dim3(a.n_pairs(), n_streams, size / (4 * quads_of_a_join)),
                                                  dim3(threads_of_a_join), 0, stream };
    if (a.n_rows * n_streams == 1) {
        dw::launch_kernel<join<true>, /*keeps_shared*/ true>(with, a, n_parts, size, gates);
    } else {
        dw::launch_kernel<join<false>>(with, a, n_parts, size, gates);
    }
}

template <int size, int n_sets> void launch_for(const attention_arguments & a, int n_parts, int n_streams,
                                                const head_gates & gates, cudaStream_t stream) {
    const int n_tiles = attention_tile<size, n_sets>::n_tiles(a);
    ggml_cuda_kernel_launch(
        attend<size, n_sets>,
        { dim3(n_tiles * n_streams, a.n_heads / a.group, n_parts), dim3(32 * warps_of_a_tile<size>), 0, stream }, a);
    launch_join(a, n_parts, size, n_streams, gates, stream);
}

// Two sets of pairs read each cell once, and wait longer for the first.
template <int size> void launch_for(const attention_arguments & a, int n_parts, int n_streams, const head_gates & gates,
                                    cudaStream_t stream) {
    const bool by_two = a.n_rows * a.group > pairs_of_a_set && a.n_cells >= least_cells_of_two_sets;
    return by_two ? launch_for<size, 2>(a, n_parts, n_streams, gates, stream)
                  : launch_for<size, 1>(a, n_parts, n_streams, gates, stream);
}

// Of queries [S, n, H, n_streams], and so of the result.
struct attention_shape {
    int64_t size, n, n_heads, n_streams;

    static attention_shape of(const ggml_tensor * dst) {
        const ggml_tensor * q = dst->src[op::q];
        return { q->ne[0], q->ne[1], q->ne[2], q->ne[3] };
    }
    int64_t n_rows() const { return n * n_streams; }
    int64_t n_pairs() const { return n_heads * n_rows(); }
    int64_t width() const { return size * n_heads; }
};

bool is_cache(const ggml_tensor * t, const attention_shape & of) {
    const size_t odd = (uintptr_t) t->data | t->nb[1] | t->nb[2] | t->nb[3];
    return t->type == GGML_TYPE_F16 && t->nb[0] == sizeof(half) && odd % 16 == 0 && t->ne[0] == of.size &&
           t->nb[1] <= INT_MAX && t->ne[3] == of.n_streams && of.n_heads % t->ne[2] == 0;
}

bool is_gate(const ggml_tensor * t, const attention_shape & of) {
    return dw::is_f32(t) && t->ne[0] == of.size && t->ne[1] == of.n_heads && t->ne[2] == of.n_rows() && t->ne[3] == 1 &&
           ((uintptr_t) t->data | t->nb[1] | t->nb[2]) % 16 == 0;
}

size_t bytes_of_ends(const ggml_tensor * dst) {
    return GGML_PAD(sizeof(float2) * attention_shape::of(dst).n_pairs() * n_attention_parts(dst->src[op::k]->ne[1]),
                    128);
}

size_t workspace(const ggml_tensor * dst) {
    const attention_shape of = attention_shape::of(dst);
    return bytes_of_ends(dst) + sizeof(float) * of.n_pairs() * n_attention_parts(dst->src[op::k]->ne[1]) * of.size;
}

// whether the result has room for the input of a product
bool goes_on(const ggml_tensor * dst) {
    const attention_shape of = attention_shape::of(dst);
    return ggml_nelements(dst) == of.n_rows() * (of.width() + flash_attention::n_gated(of.width()));
}

bool takes(const ggml_tensor * dst) {
    const auto *          src = dst->src;
    const ggml_tensor *   q = src[op::q], *mask = src[op::mask], *tree = src[op::tree], *gate = src[op::gate];
    const attention_shape of = attention_shape::of(dst);
    return is_attention_size(of.size) && dw::is_f32(dst) && ggml_is_contiguous(dst) && dw::is_f32(q) &&
           (goes_on(dst) || (!gate && ggml_nelements(dst) == of.n_rows() * of.width())) &&
           ((uintptr_t) q->data | q->nb[1] | q->nb[2] | q->nb[3]) % 16 == 0 && is_cache(src[op::k], of) &&
           is_cache(src[op::v], of) && src[op::k]->ne[1] == src[op::v]->ne[1] &&
           src[op::k]->ne[2] == src[op::v]->ne[2] && mask->type == GGML_TYPE_F16 && mask->nb[0] == sizeof(half) &&
           mask->ne[0] == src[op::k]->ne[1] && mask->ne[1] >= of.n && mask->ne[2] == 1 && mask->ne[3] == of.n_streams &&
           mask->nb[1] <= INT_MAX && of.n >= 1 && of.n_rows() <= max_rows && dw::ptx::has_products() &&
           n_attention_parts(src[op::k]->ne[1]) <= most_parts &&
           (!tree || (dw::is_i32(tree) && tree->ne[0] >= of.n_rows() && tree->ne[1] == 4)) &&
           (!gate || is_gate(gate, of));
}

static_assert(activations::quantised::bytes(1, 4096) == sizeof(float) * flash_attention::n_gated(4096),
              "rows of dst behind the sums");

head_gates gates_of(const ggml_tensor * dst) {
    const attention_shape of   = attention_shape::of(dst);
    const ggml_tensor *   gate = dst->src[op::gate];
    head_gates            made{};
    if (gate) {
        made = { dw::data_of<const char>(gate), (int64_t) gate->nb[1], (int64_t) gate->nb[2], {} };
    }
    if (goes_on(dst)) {
        char * const at = (char *) (dw::data_of<float>(dst) + of.n_rows() * of.width());
        made.to         = activations::quantised::in(at, of.n_rows(), of.width());
    }
    return made;
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const auto *          src = dst->src;
    const ggml_tensor *   q = src[op::q], *mask = src[op::mask], *tree = src[op::tree];
    const attention_shape of = attention_shape::of(dst);
    attention_arguments   a  = {};
    a.q                      = dw::data_of<const char>(q);
    a.q_row                  = (int64_t) q->nb[1];
    a.q_head                 = (int64_t) q->nb[2];
    a.q_stream               = (int64_t) q->nb[3];
    a.k                      = half_rows::from(src[op::k]);
    a.v                      = half_rows::from(src[op::v]);
    a.mask                   = half_rows::from(mask);
    a.masks_are_aligned      = ((uintptr_t) mask->data | mask->nb[1] | mask->nb[3]) % 8 == 0;
    a.tree                   = tree ? dw::data_of<const int32_t>(tree) : nullptr;
    a.tree_rows              = tree ? (int) tree->ne[0] : 0;
    a.n_rows                 = (int) of.n;
    a.n_cells                = (int) src[op::k]->ne[1];
    a.n_heads                = (int) of.n_heads;
    a.group                  = (int) (of.n_heads / src[op::k]->ne[2]);
    a.scale                  = settings_of(dst).scale;
    a.ends                   = (float2 *) with.workspace;
    a.sums                   = (float *) ((char *) with.workspace + bytes_of_ends(dst));
    a.out                    = dw::data_of<float>(dst);
    const head_gates gates   = gates_of(dst);
    const int        n_parts = n_attention_parts(a.n_cells), n_streams = (int) of.n_streams;
    switch (of.size) {
        case 64:
            return launch_for<64>(a, n_parts, n_streams, gates, with.stream);
        case 128:
            return launch_for<128>(a, n_parts, n_streams, gates, with.stream);
        default:
            return launch_for<256>(a, n_parts, n_streams, gates, with.stream);
    }
}

} // namespace

namespace dw::layer_parts {
const op_descriptor flash_attention::on_cuda = { flash_attention::signature, nullptr, takes, workspace, launch };
} // namespace dw::layer_parts
