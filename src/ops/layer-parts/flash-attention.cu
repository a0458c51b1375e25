// Attention of few rows on CUDA: layer-parts.h. Two kernels: parts of the cells (attention-tile.cuh), and their sum
// (attention-sum.cuh).

#include "ops/layer-parts/attention-sum.cuh"
#include "ops/layer-parts/attention-tile.cuh"

namespace {

using namespace dw::layer_parts;
namespace op = dw::layer_parts::flash_attention;

constexpr int least_cells_of_two_sets = 4096;

// The part of a block: those of equal size in order, so that the ones with cells begin first, else the largest first.
__device__ __forceinline__ int part_of_block() {
    return gridDim.z <= n_smallest_parts ? blockIdx.z : gridDim.z - 1 - blockIdx.z;
}

// blocks: (tile of a stream, head of keys, part): those that read the same cells run together
template <ggml_type type, int size, int n_sets> __global__ void __launch_bounds__(32 * warps_of_a_tile<size>, 2)
    attend(const __grid_constant__ attention_arguments a) {
    __shared__ block_memory<size, n_sets> memory;
    extern __shared__ __align__(16) char stage_memory[];
    ggml_cuda_pdl_lc();
    const int                          at    = part_of_block();
    const attention_part               part  = attention_part::of(at);
    const int                          first = part.first * chunk;
    attention_tile<type, size, n_sets> tile(a, memory, stage_memory);
    const int                          end = tile.prepare(first, min(first + part.n * chunk, a.n_cells));
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

template <ggml_type type, int size, int n_sets> void
launch_for(const attention_arguments & a, int n_parts, int n_streams, const head_gates & gates, cudaStream_t stream) {
    const int n_tiles = attention_tile<type, size, n_sets>::n_tiles(a);
    dw::launch_kernel<attend<type, size, n_sets>>({ dim3(n_tiles * n_streams, a.n_heads / a.group, n_parts),
                                                    dim3(32 * warps_of_a_tile<size>), chunk_stage<type, size>::bytes,
                                                    stream },
                                                  a);
    launch_sum(a, n_parts, size, n_streams, gates, stream);
}

// Two sets of pairs read each cell once, and wait longer for the first.
template <ggml_type type, int size> void launch_for(const attention_arguments & a, int n_parts, int n_streams,
                                                    const head_gates & gates, cudaStream_t stream) {
    const bool by_two = a.n_rows * a.group > pairs_of_a_set && a.n_cells >= least_cells_of_two_sets;
    return by_two ? launch_for<type, size, 2>(a, n_parts, n_streams, gates, stream)
                  : launch_for<type, size, 1>(a, n_parts, n_streams, gates, stream);
}

template <ggml_type type> void launch_for(const attention_arguments & a, int64_t size, int n_parts, int n_streams,
                                          const head_gates & gates, cudaStream_t stream) {
    switch (size) {
        case 64:
            return launch_for<type, 64>(a, n_parts, n_streams, gates, stream);
        case 128:
            return launch_for<type, 128>(a, n_parts, n_streams, gates, stream);
        default:
            return launch_for<type, 256>(a, n_parts, n_streams, gates, stream);
    }
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

static_assert(chunk_stage<GGML_TYPE_Q8_0, 256>::is_used && !chunk_stage<GGML_TYPE_Q8_0, 128>::is_used &&
                  !chunk_stage<GGML_TYPE_Q8_0, 64>::is_used,
              "which rows begin at multiples of 16 bytes: is_cache");

bool is_cache(const ggml_tensor * t, const attention_shape & of) {
    const size_t odd = (uintptr_t) t->data | t->nb[1] | t->nb[2] | t->nb[3];
    return is_attention_type(t->type) && t->nb[0] == ggml_type_size(t->type) &&
           odd % (t->type == GGML_TYPE_F16 || of.size == 256 ? 16 : 4) == 0 && t->ne[0] == of.size &&
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
bool writes_product_input(const ggml_tensor * dst) {
    const attention_shape of = attention_shape::of(dst);
    return ggml_nelements(dst) == of.n_rows() * (of.width() + flash_attention::n_gated(of.width()));
}

bool takes(const ggml_tensor * dst) {
    const auto *          src = dst->src;
    const ggml_tensor *   q = src[op::q], *mask = src[op::mask], *tree = src[op::tree], *gate = src[op::gate];
    const attention_shape of = attention_shape::of(dst);
    return is_attention_size(of.size) && dw::is_f32(dst) && ggml_is_contiguous(dst) && dw::is_f32(q) &&
           (writes_product_input(dst) || (!gate && ggml_nelements(dst) == of.n_rows() * of.width())) &&
           ((uintptr_t) q->data | q->nb[1] | q->nb[2] | q->nb[3]) % 16 == 0 && is_cache(src[op::k], of) &&
           is_cache(src[op::v], of) && src[op::k]->type == src[op::v]->type &&
           (settings_of(dst).v_hadamard == 0 || settings_of(dst).v_hadamard == 64) &&
           src[op::k]->ne[1] == src[op::v]->ne[1] && src[op::k]->ne[2] == src[op::v]->ne[2] &&
           mask->type == GGML_TYPE_F16 && mask->nb[0] == sizeof(half) && mask->ne[0] == src[op::k]->ne[1] &&
           mask->ne[1] >= of.n && mask->ne[2] == 1 && mask->ne[3] == of.n_streams && mask->nb[1] <= INT_MAX &&
           of.n >= 1 && of.n_rows() <= max_rows && dw::ptx::has_products() &&
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
    if (writes_product_input(dst)) {
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
    a.k                      = strided_rows::from(src[op::k]);
    a.v                      = strided_rows::from(src[op::v]);
    a.mask                   = strided_rows::from(mask);
    a.masks_are_aligned      = ((uintptr_t) mask->data | mask->nb[1] | mask->nb[3]) % 8 == 0;
    a.tree                   = tree ? dw::data_of<const int32_t>(tree) : nullptr;
    a.tree_rows              = tree ? (int) tree->ne[0] : 0;
    a.n_rows                 = (int) of.n;
    a.n_cells                = (int) src[op::k]->ne[1];
    a.n_heads                = (int) of.n_heads;
    a.group                  = (int) (of.n_heads / src[op::k]->ne[2]);
    a.scale                  = settings_of(dst).scale;
    a.is_transformed         = settings_of(dst).v_hadamard > 0;
    a.ends                   = (float2 *) with.workspace;
    a.sums                   = (float *) ((char *) with.workspace + bytes_of_ends(dst));
    a.out                    = dw::data_of<float>(dst);
    const head_gates gates   = gates_of(dst);
    const int        n_parts = n_attention_parts(a.n_cells), n_streams = (int) of.n_streams;
    if (src[op::k]->type == GGML_TYPE_F16) {
        launch_for<GGML_TYPE_F16>(a, of.size, n_parts, n_streams, gates, with.stream);
    } else {
        launch_for<GGML_TYPE_Q8_0>(a, of.size, n_parts, n_streams, gates, with.stream);
    }
}

} // namespace

namespace dw::layer_parts {
const op_descriptor flash_attention::on_cuda = { flash_attention::signature, nullptr, takes, workspace, launch };
} // namespace dw::layer_parts
