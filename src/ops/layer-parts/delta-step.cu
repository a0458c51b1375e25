// The delta rule of a gated-delta-net layer over a chain of rows on CUDA (layer-parts.h). It starts while the
// convolution before it ends. Test: tests/gpu/test_layer_parts_cuda.py.

#include "ops/delta-net/delta-step-cuda.h"
#include "ops/door/launch.h"
#include "ops/layer-parts/delta-cells.h"
#include "ops/layer-parts/gated.cuh"

namespace {

using namespace dw::layer_parts;

constexpr int columns = 32; // of a block, a warp each

// blocks for which a multiprocessor has threads
#if __CUDA_ARCH__ == 800 || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200)
constexpr int steps_at_once = 2;
#else
constexpr int steps_at_once = 1;
#endif

struct by_row {
    const float * data;
    int64_t       head, row; // strides in values
    int           n_heads;

    static by_row from(const ggml_tensor * t) {
        return { dw::data_of<const float>(t), dw::stride_of(t, 1), dw::stride_of(t, 2), (int) t->ne[1] };
    }
    __device__ __forceinline__ const float * of(int h, int r) const { return data + h % n_heads * head + r * row; }
};

struct step_arguments {
    by_row          q, k, v, g, beta;
    const float *   states;
    int64_t         stride;
    const int32_t * cells;
    float *         target;
    float *         out;
    int             n_heads, n;
    float           scale;
    gated_row       gated;
    const float *   z; // [heads][size], of a single row; nullptr: nothing is gated
    const float *   norm;
};

// What a row brings to a column of a head's state.
template <int per_lane> struct row_of_head {
    float k[per_lane], q[per_lane], v, g, beta;

    __device__ __forceinline__ row_of_head(const step_arguments & a, int head, int r, int column) :
        v(a.v.of(head, r)[column]),
        g(*a.g.of(head, r)),
        beta(*a.beta.of(head, r)) {
        const float *keys = a.k.of(head, r), *queries = a.q.of(head, r);
#pragma unroll
        for (int i = 0; i < per_lane; ++i) {
            k[i] = keys[32 * i + threadIdx.x % 32];
            q[i] = queries[32 * i + threadIdx.x % 32];
        }
    }
};

// blocks: (head, part of its columns); a warp carries a column of the state along the rows, and asks for the next one
// while it works on a row. A single row leaves registers for the kernel behind it.
template <int size, bool is_single> __global__ void __launch_bounds__(32 * columns, is_single ? steps_at_once : 1)
    step(step_arguments a) {
    constexpr int    per_lane = size / 32;
    __shared__ float answers[columns]; // of a single row
    ggml_cuda_pdl_lc();
    const int     head = blockIdx.x, column = blockIdx.y * columns + threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t at   = ((int64_t) head * size + column) * size;
    const float * from = a.states + a.cells[0] * a.stride + at; // an input, written before the graph
    prefetch(from, size * (int) sizeof(float), lane, 32);
    ggml_cuda_pdl_sync();
    row_of_head<per_lane> row(a, head, 0, column);
    float                 state[per_lane];
#pragma unroll
    for (int i = 0; i < per_lane; ++i) {
        state[i] = from[32 * i + lane];
    }
    for (int r = 0; r < a.n; ++r) {
        row_of_head<per_lane> next = row;
        if (!is_single) {
            next = row_of_head<per_lane>(a, head, min(r + 1, a.n - 1), column);
        }
        float seen = 0.0f, answer = 0.0f;
#pragma unroll
        for (int i = 0; i < per_lane; ++i) {
            seen += state[i] * row.k[i];
        }
        seen              = sum_of_lanes(seen);
        const float decay = expf(row.g);
        const float delta = (row.v - decay * seen) * row.beta;
#pragma unroll
        for (int i = 0; i < per_lane; ++i) {
            state[i] = dw::delta_step<size <= dw::small_head>(state[i], decay, row.k[i], delta);
            answer += state[i] * row.q[i];
        }
        answer = sum_of_lanes(answer) * a.scale;
        if (lane == 0) {
            a.out[((int64_t) r * a.n_heads + head) * size + column] = answer;
            answers[threadIdx.x / 32]                               = answer;
        }
        row = next;
    }
#pragma unroll
    for (int i = 0; i < per_lane; ++i) {
        a.target[at + 32 * i + lane] = state[i];
    }
    if (is_single && a.z) {
        __syncthreads();
        if (threadIdx.x < 32) {
            const int value = blockIdx.y * columns + lane;
            a.gated.store(head * per_lane + blockIdx.y,
                          gated_block(answers[lane], a.norm[value], a.z[head * size + value]));
        }
    }
}

namespace step_op {

namespace of = dw::layer_parts::delta_step;

bool takes(const ggml_tensor * dst) {
    const auto *        src = dst->src;
    const ggml_tensor * v   = src[of::v];
    for (int i : { of::q, of::k, of::v, of::g, of::beta }) {
        if (!dw::is_f32(src[i]) || src[i]->ne[2] != v->ne[2] || src[i]->ne[3] != 1) {
            return false;
        }
    }
    const ggml_tensor *z = src[of::z], *norm = src[of::norm];
    const int64_t      n_values = ggml_nelements(v);
    if (z && !(v->ne[2] == 1 && dw::is_f32(z) && ggml_is_contiguous(z) && ggml_nelements(z) == n_values && norm &&
               dw::is_f32(norm) && ggml_is_contiguous(norm) && ggml_nelements(norm) == v->ne[0])) {
        return false;
    }
    return dw::is_f32(dst) && ggml_is_contiguous(dst) && (v->ne[0] == 32 || v->ne[0] == 64 || v->ne[0] == 128) &&
           v->ne[2] <= max_rows && src[of::g]->ne[0] == 1 &&
           ggml_nelements(dst) == n_values + (z ? of::n_gated(n_values) : 0) && src[of::k]->ne[0] == v->ne[0] &&
           v->ne[1] % src[of::k]->ne[1] == 0 && src[of::states]->ne[0] == v->ne[0] * v->ne[0] * v->ne[1] &&
           dw::is_i32(src[of::cells]) && is_cell(src[of::target], src[of::states]);
}

template <int size> void launch_step(const ggml_cuda_kernel_launch_params & blocks, const step_arguments & a) {
    if (a.n == 1) {
        ggml_cuda_kernel_launch(step<size, true>, blocks, a);
    } else {
        ggml_cuda_kernel_launch(step<size, false>, blocks, a);
    }
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const auto *                         src   = dst->src;
    const ggml_tensor *                  v     = src[of::v];
    const int64_t                        width = v->ne[0] * v->ne[1];
    const step_arguments                 a     = { by_row::from(src[of::q]),
                                                   by_row::from(src[of::k]),
                                                   by_row::from(v),
                                                   by_row::from(src[of::g]),
                                                   by_row::from(src[of::beta]),
                                                   dw::data_of<const float>(src[of::states]),
                                                   dw::stride_of(src[of::states], 1),
                                                   dw::data_of<const int32_t>(src[of::cells]),
                                                   dw::data_of<float>(src[of::target]),
                                                   dw::data_of<float>(dst),
                                                   (int) v->ne[1],
                                                   (int) v->ne[2],
                                                   1.0f / sqrtf((float) v->ne[0]),
                                                   gated_row::in(dw::data_of<float>(dst) + ggml_nelements(v), width),
                               src[of::z] ? dw::data_of<const float>(src[of::z]) : nullptr,
                               src[of::z] ? dw::data_of<const float>(src[of::norm]) : nullptr };
    const ggml_cuda_kernel_launch_params blocks{ dim3((unsigned) v->ne[1], (unsigned) v->ne[0] / columns),
                                                 dim3(32 * columns), 0, with.stream };
    switch (v->ne[0]) {
        case 32:
            return launch_step<32>(blocks, a);
        case 64:
            return launch_step<64>(blocks, a);
        default:
            return launch_step<128>(blocks, a);
    }
}

} // namespace step_op

} // namespace

namespace dw::layer_parts {
const op_descriptor delta_step::on_cuda = { delta_step::signature, nullptr, step_op::takes, nullptr, step_op::launch };
} // namespace dw::layer_parts
