// The norm in front of an output head on CUDA: layer-parts.h.

#include "ops/door/chain.cuh"
#include "ops/door/launch.h"
#include "ops/layer-parts/products.cuh"

namespace {

using namespace dw::layer_parts;

namespace of = norm_of_rows;

// A block a row. The weights are there before the kernel in front has ended: behind it they would wait for those of the
// head, which its kernel asks for meanwhile.
__global__ void __launch_bounds__(most_threads) normalise(const float * x, int64_t stride, const float * norm,
                                                          float epsilon, int width, float * out, int64_t out_stride) {
    __shared__ float sums[most_threads / 32];
    ggml_cuda_pdl_lc();
    const team   by      = team::of_block();
    const groups weights = groups::of<GGML_TYPE_F32>(norm, width, by);
    ggml_cuda_pdl_sync();
    const groups values = groups::of<GGML_TYPE_F32>(x + blockIdx.x * stride, width, by);
    const float  sum    = sum_of_lanes(values.dot(values));
    if (threadIdx.x % 32 == 0) {
        sums[by.warp] = sum;
    }
    by.meet();
    const float  factor = rsqrtf(sum_of_warps(sums, by.n_warps) / width + epsilon);
    const groups scaled = values.times(weights);
#pragma unroll
    for (int i = 0; i < per_thread; ++i) {
        const int at = groups::index(i, by);
        if (4 * at < width) {
            ((float4 *) (out + blockIdx.x * out_stride))[at] = times(scaled.at[i], factor);
        }
    }
}

bool takes(const ggml_tensor * dst) {
    const ggml_tensor * x = dst->src[of::x];
    return is_rows(x, dst->ne[1]) && is_rows(dst, x->ne[1]) && x->ne[0] == dst->ne[0] && x->ne[0] <= max_width &&
           is_vector(dst->src[of::norm], x->ne[0]);
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const ggml_tensor * x     = dst->src[of::x];
    const int64_t       width = x->ne[0];
    dw::launch_kernel<normalise, /*keeps_shared*/ true>(
        { dim3((unsigned) x->ne[1]), dim3(threads_for(width)), 0, with.stream }, dw::data_of<const float>(x),
        dw::stride_of(x, 1), dw::data_of<const float>(dst->src[of::norm]), settings_of(dst).epsilon, (int) width,
        dw::data_of<float>(dst), dw::stride_of(dst, 1));
}

} // namespace

const dw::op_descriptor norm_of_rows::on_cuda = { norm_of_rows::signature, nullptr, takes, nullptr, launch };
