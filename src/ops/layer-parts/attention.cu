// The middle of an attention layer on CUDA, up to the attention itself: layer-parts.h. One kernel, a warp a head and
// row.

#include "ops/door/launch.h"
#include "ops/layer-parts/dots.cuh"
#include "ops/layer-parts/hadamard.cuh"
#include "ops/layer-parts/hadamard.h"
#include "ops/layer-parts/rotation.h"

namespace {

using namespace dw::layer_parts;
namespace op = dw::layer_parts::attention_heads;

constexpr int values_of_lane = max_head / 32;
constexpr int max_pairs      = values_of_lane / 2; // of a lane
constexpr int warps_of_all   = 4;                  // of a block

// f32, strides in bytes
struct heads_of {
    const char * data;
    int64_t      head, row;

    static heads_of from(const ggml_tensor * t) {
        return { dw::data_of<const char>(t), (int64_t) t->nb[1], (int64_t) t->nb[2] };
    }
    __device__ __forceinline__ const float * of(int h, int r) const {
        return (const float *) (data + h * head + r * row);
    }
};

// a row of a KV cache
struct cache_row {
    char *    data;
    ggml_type type;

    // value i of the row, F16 or F32
    __device__ __forceinline__ void write(int i, float x) const {
        if (type == GGML_TYPE_F16) {
            ((half *) data)[i] = __float2half(x);
        } else {
            ((float *) data)[i] = x;
        }
    }

    // Values [first, first + n) of a row of Q8_0, from `values` on, rounded as ggml rounds. All lanes; not unrolled,
    // since code has to come from L2.
    __device__ __forceinline__ void write_blocks(int first, const float * values, int n) const {
        block_q8_0 * const to = (block_q8_0 *) data + first / QK8_0;
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < n; i += QK8_0) {
            const float x = values[i], scale = most_of_lanes(fabsf(x)) / 127.0f;
            to[i / QK8_0].qs[i % QK8_0] = (int8_t) roundf(scale > 0.0f ? x * (1.0f / scale) : 0.0f);
            if (i % QK8_0 == 0) {
                to[i / QK8_0].d = __float2half(scale);
            }
        }
    }
};

// where rows of a batch go to
struct cache_rows {
    char *          data;
    int64_t         stride; // bytes
    const int64_t * cells;
    ggml_type       type;

    static cache_rows from(const ggml_tensor * cache, const ggml_tensor * cells) {
        return { dw::data_of<char>(cache), (int64_t) cache->nb[1], dw::data_of<const int64_t>(cells), cache->type };
    }
    __device__ __forceinline__ cache_row of(int row) const { return { data + cells[row] * stride, type }; }
};

struct head_arguments {
    heads_of        q, k, v;
    const float *   q_norm, *k_norm;
    const int32_t * positions;
    cache_rows      k_cache, v_cache;
    float *         out;
    int             size, n_heads, n_keys, n; // heads of queries, of keys; rows
    settings        with;
    float           step; // rotation.h
};

// How this lane's pairs of a row turn.
struct turned {
    float sine[max_pairs], cosine[max_pairs];

    __device__ __forceinline__ turned(const head_arguments & a, int row, int lane) {
#pragma unroll
        for (int j = 0; j < max_pairs; ++j) {
            const int i = lane + 32 * j;
            if (i < a.with.n_dims / 2) {
                const int32_t position = a.positions[position_of(i, a.with) * a.n + row];
                const double  turns    = position * turns_of(i, a.step, a.with.scale);
                sincospif((float) (2.0 * part_of_turn(turns)), &sine[j], &cosine[j]);
            }
        }
    }
};

// to[j] becomes value lane + 32 j of a head; behind its end 0.
__device__ __forceinline__ void load_head(float (&to)[values_of_lane], const float * from, int size) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < values_of_lane; ++j) {
        to[j] = lane + 32 * j < size ? from[lane + 32 * j] : 0.0f;
    }
}

__device__ __forceinline__ void store_head(float * to, const float (&from)[values_of_lane], int size) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < values_of_lane; ++j) {
        if (lane + 32 * j < size) {
            to[lane + 32 * j] = from[j];
        }
    }
}

// rms_norm(from) * norm, turned, of a head; `values` are a warp's. norm: this lane's.
__device__ __forceinline__ void finish_head(const head_arguments & a, const float *             from,
                                            const float (&norm)[values_of_lane], const turned & by, float * values) {
    const int lane = threadIdx.x % 32, half_size = a.with.n_dims / 2;
    float     mine[values_of_lane], sum          = 0.0f;
    load_head(mine, from, a.size);
#pragma unroll
    for (int j = 0; j < values_of_lane; ++j) {
        sum += mine[j] * mine[j];
    }
    const float scale = rsqrtf(sum_of_lanes(sum) / a.size + a.with.epsilon);
#pragma unroll
    for (int j = 0; j < values_of_lane; ++j) {
        if (lane + 32 * j < a.size) {
            values[lane + 32 * j] = mine[j] * (scale * norm[j]);
        }
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < max_pairs; ++j) {
        const int i = lane + 32 * j;
        if (i < half_size) {
            const float x = values[i], y = values[i + half_size];
            values[i]             = x * by.cosine[j] - y * by.sine[j];
            values[i + half_size] = x * by.sine[j] + y * by.cosine[j];
        }
    }
    __syncwarp();
}

// blocks: (warps_of_all heads of queries, then of keys, then as many values in parts of `size`; row). Positions and
// cells are inputs, written before the graph: all that is made of them is there when the kernel's wait ends.
__global__ void heads_of_attention(head_arguments a, int n_all) {
    __shared__ float heads[warps_of_all][max_head];
    const int        lane = threadIdx.x % 32, r = blockIdx.y, which = blockIdx.x * warps_of_all + threadIdx.x / 32;
    const int        head     = which < a.n_heads ? which : which - a.n_heads;
    const bool       is_query = which < a.n_heads, is_value = which >= a.n_heads + a.n_keys;
    const turned     by(a, r, lane);
    const cache_row  cell = is_value ? a.v_cache.of(r) : a.k_cache.of(r);
    float            norm[values_of_lane];
#pragma unroll
    for (int j = 0; j < values_of_lane; ++j) {
        norm[j] = lane + 32 * j < a.size ? (is_query ? a.q_norm : a.k_norm)[lane + 32 * j] : 0.0f;
    }
    ggml_cuda_pdl_sync();
    ggml_cuda_pdl_lc(); // earlier, blocks of attention would take the places of blocks that have not begun
    if (which >= n_all) {
        return;
    }
    float     mine[values_of_lane];
    const int first = (is_value ? head - a.n_keys : head) * a.size; // of the row
    if (is_value) {
        load_head(mine, a.v.of(0, r) + first, a.size);
    } else {
        finish_head(a, is_query ? a.q.of(head, r) : a.k.of(head, r), norm, by, heads[threadIdx.x / 32]);
        load_head(mine, heads[threadIdx.x / 32], a.size);
    }
    if (const int n = is_value ? a.with.v_hadamard : a.with.k_hadamard) {
        apply_hadamard(mine, n);
    }
    if (!is_query && cell.type == GGML_TYPE_Q8_0) {
        float * const values = heads[threadIdx.x / 32];
        store_head(values, mine, a.size);
        __syncwarp();
        return cell.write_blocks(first, values, a.size);
    }
#pragma unroll
    for (int j = 0; j < values_of_lane; ++j) {
        const int i = lane + 32 * j;
        if (i < a.size && is_query) {
            a.out[((int64_t) r * a.n_heads + head) * a.size + i] = mine[j];
        } else if (i < a.size) {
            cell.write(first + i, mine[j]);
        }
    }
}

bool is_cache(const ggml_tensor * cache, const ggml_tensor * cells, int64_t width, int64_t n) {
    return cache->ne[0] == width && cache->nb[0] == ggml_type_size(cache->type) && cells->type == GGML_TYPE_I64 &&
           ggml_is_contiguous(cells) && ggml_nelements(cells) == n;
}

bool takes(const ggml_tensor * dst) {
    const auto *       src = dst->src;
    const ggml_tensor *q = src[op::q], *k = src[op::k], *v = src[op::v];
    const settings     with = settings_of(dst);
    const int64_t      size = q->ne[0], n = q->ne[2], n_positions = pairs_of_sections(with) > 0 ? 4 * n : n;
    for (const ggml_tensor * norm : { src[op::q_norm], src[op::k_norm] }) {
        if (!dw::is_f32(norm) || ggml_nelements(norm) != size) {
            return false;
        }
    }
    return dw::is_f32(dst) && ggml_is_contiguous(dst) && ggml_nelements(dst) == ggml_nelements(q) && dw::is_f32(q) &&
           dw::is_f32(k) && dw::is_f32(v) && size <= max_head && k->ne[0] == size && k->ne[2] == n && v->ne[1] == n &&
           v->ne[0] % size == 0 && n >= 1 && n <= max_rows && with.n_dims % 2 == 0 && with.n_dims > 0 &&
           with.n_dims <= size && is_heads_cache(src[op::k_cache]->type, size, with.k_hadamard) &&
           is_heads_cache(src[op::v_cache]->type, size, with.v_hadamard) && dw::is_i32(src[op::positions]) &&
           ggml_nelements(src[op::positions]) == n_positions &&
           is_cache(src[op::k_cache], src[op::k_cells], size * k->ne[1], n) &&
           is_cache(src[op::v_cache], src[op::v_cells], v->ne[0], n);
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const auto *         src   = dst->src;
    const ggml_tensor *  v     = src[op::v];
    const head_arguments a     = { heads_of::from(src[op::q]),
                                   heads_of::from(src[op::k]),
                                   { dw::data_of<const char>(v), 0, (int64_t) v->nb[1] },
                                   dw::data_of<const float>(src[op::q_norm]),
                                   dw::data_of<const float>(src[op::k_norm]),
                                   dw::data_of<const int32_t>(src[op::positions]),
                                   cache_rows::from(src[op::k_cache], src[op::k_cells]),
                                   cache_rows::from(src[op::v_cache], src[op::v_cells]),
                                   dw::data_of<float>(dst),
                                   (int) src[op::q]->ne[0],
                                   (int) src[op::q]->ne[1],
                                   (int) src[op::k]->ne[1],
                                   (int) src[op::q]->ne[2],
                                   settings_of(dst),
                                   step_of(settings_of(dst)) };
    const int            n_all = a.n_heads + a.n_keys + (int) (v->ne[0] / a.size);
    ggml_cuda_kernel_launch(heads_of_attention,
                            { dim3(dw::n_blocks(n_all, warps_of_all), a.n), dim3(32 * warps_of_all), 0, with.stream },
                            a, n_all);
}

} // namespace

namespace dw::layer_parts {
const op_descriptor attention_heads::on_cuda = { attention_heads::signature, nullptr, takes, nullptr, launch };
} // namespace dw::layer_parts
