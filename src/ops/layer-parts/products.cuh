// Products of rows of activations with several weights in one launch, and the norm before them. One or two rows of
// weights a warp. A kernel starts while the one before it ends, and asks for its weights in the meantime.
// Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/door/launch.h"
#include "ops/layer-parts/rows.cuh"

namespace dw::layer_parts {

constexpr int warps     = 4; // of a block of products
constexpr int max_parts = 4;

enum class end_of_product { as_is, sigmoid, softplus, add };

// Weights [K, rows] and where their products go.
struct part {
    const char *   weights;
    int64_t        stride; // bytes of a row
    ggml_type      type;
    int            n_rows, first_warp;
    float *        out; // [n][out_stride]
    int64_t        out_stride;
    end_of_product end;
    const float *  a; // softplus: added before [rows]; add: the residual [n][a_stride]
    const float *  b; // softplus: multiplied with [rows]
    int64_t        a_stride;
};

struct parts {
    part each[max_parts];
    int  n;
};

static __global__ void __launch_bounds__(1024)
    normalise(const float * x, int64_t stride, const float * norm, float epsilon, activations out) {
    __shared__ float sums[32];
    ggml_cuda_pdl_lc();
    const int    row     = blockIdx.x;
    const groups weights = groups::of<GGML_TYPE_F32>(norm, out.width);
    ggml_cuda_pdl_sync();
    const groups values = groups::of<GGML_TYPE_F32>(x + row * stride, out.width);
    const float  sum    = sum_of_lanes(values.dot(values));
    if (threadIdx.x % 32 == 0) {
        sums[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    const float scale = rsqrtf(sum_of_warps(sums) / out.width + epsilon);
    out.store(row, values.times(weights), scale);
}

static __device__ float ended(const part & of, float sum, int row, int column) {
    switch (of.end) {
        case end_of_product::sigmoid:
            return sigmoid(sum);
        case end_of_product::softplus: {
            const float x = sum + of.a[row];
            return (x > 20.0f ? x : logf(1.0f + expf(x))) * of.b[row];
        }
        case end_of_product::add:
            return of.a[column * of.a_stride + row] + sum;
        default:
            return sum;
    }
}

// rows [first, first + rows_of_a_warp) of a part with n columns, n_columns at a time
template <ggml_type type, int rows_of_a_warp, int n_columns>
__device__ void multiply(const part & of, const activations & x, int first, int n, int lane) {
    const int    last = of.n_rows - 1;
    const char * rows[rows_of_a_warp];
#pragma unroll
    for (int m = 0; m < rows_of_a_warp; ++m) {
        rows[m] = of.weights + min(first + m, last) * of.stride;
    }
    for (int c0 = 0; c0 < n; c0 += n_columns) {
        column columns[n_columns];
        float  sums[rows_of_a_warp][n_columns] = {};
#pragma unroll
        for (int c = 0; c < n_columns; ++c) {
            columns[c] = x.of(min(c0 + c, n - 1));
        }
        add_dots<type>(sums, rows, columns, x.width, lane);
        add_lanes(sums);
#pragma unroll
        for (int m = 0; m < rows_of_a_warp; ++m) {
#pragma unroll
            for (int c = 0; c < n_columns; ++c) {
                if (lane == m * n_columns + c && first + m <= last && c0 + c < n) {
                    of.out[(c0 + c) * of.out_stride + first + m] = ended(of, sums[m][c], first + m, c0 + c);
                }
            }
        }
    }
}

template <int rows_of_a_warp, int n_columns> __global__ void __launch_bounds__(32 * warps)
    products(parts all, activations x, int n) {
    static_assert(rows_of_a_warp * n_columns <= 32, "a lane a sum");
    ggml_cuda_pdl_lc();
    const int warp = blockIdx.x * warps + threadIdx.x / 32, lane = threadIdx.x % 32;
    int       i = 0;
    while (i + 1 < all.n && warp >= all.each[i + 1].first_warp) {
        ++i;
    }
    const part & of    = all.each[i];
    const int    first = rows_of_a_warp * (warp - of.first_warp);
    if (first < of.n_rows) {
        prefetch(of.weights + first * of.stride, min(rows_of_a_warp, of.n_rows - first) * (int) of.stride, lane);
    }
    ggml_cuda_pdl_sync();
    if (first < of.n_rows) {
        with_type(of.type, [&](auto type) {
            multiply<decltype(type)::value, rows_of_a_warp, n_columns>(of, x, first, n, lane);
        });
    }
}

// Launch-time description of the parts.
class product_list {
  public:
    // Returns the part, whose end may be set.
    part & add(const ggml_tensor * weights, float * out, int64_t out_stride) {
        part & made     = all_.each[all_.n++];
        made            = {};
        made.weights    = (const char *) weights->data;
        made.stride     = (int64_t) weights->nb[1];
        made.type       = weights->type;
        made.n_rows     = (int) weights->ne[1];
        made.out        = out;
        made.out_stride = out_stride;
        made.end        = end_of_product::as_is;
        return made;
    }

    // x: n rows
    void launch(const activations & x, int n, cudaStream_t stream) {
        int n_rows = 0;
        for (int i = 0; i < all_.n; ++i) {
            n_rows += all_.each[i].n_rows;
        }
        const bool is_small = n_rows <= 8192; // more warps keep more loads in flight than larger ones
        switch (n) {
            case 1:
                return is_small ? launch_for<1, 1>(x, n, stream) : launch_for<2, 1>(x, n, stream);
            case 2:
                return is_small ? launch_for<1, 2>(x, n, stream) : launch_for<2, 2>(x, n, stream);
            case 3:
            case 4:
                return is_small ? launch_for<1, 4>(x, n, stream) : launch_for<2, 4>(x, n, stream);
            default:
                return launch_for<1, 8>(x, n, stream);
        }
    }

  private:
    template <int rows_of_a_warp, int n_columns> void launch_for(const activations & x, int n, cudaStream_t stream) {
        int n_warps = 0;
        for (int i = 0; i < all_.n; ++i) {
            all_.each[i].first_warp = n_warps;
            n_warps += (all_.each[i].n_rows + rows_of_a_warp - 1) / rows_of_a_warp;
        }
        ggml_cuda_kernel_launch(products<rows_of_a_warp, n_columns>,
                                { dim3(dw::n_blocks(n_warps, warps)), dim3(32 * warps), 0, stream }, all_, x, n);
    }

    parts all_{};
};

inline void launch_norm(const dw::launch_context & with, const ggml_tensor * x, const ggml_tensor * norm, float epsilon,
                        const activations & out) {
    ggml_cuda_kernel_launch(normalise, { dim3((unsigned) x->ne[1]), dim3(threads_for(x->ne[0])), 0, with.stream },
                            dw::data_of<const float>(x), dw::stride_of(x, 1), dw::data_of<const float>(norm), epsilon,
                            out);
}

// dst = residual + weights x
inline void add_product(const dw::launch_context & with, ggml_tensor * dst, const ggml_tensor * weights,
                        const ggml_tensor * residual, const activations & x) {
    product_list list;
    part &       made = list.add(weights, dw::data_of<float>(dst), dw::stride_of(dst, 1));
    made.end          = end_of_product::add;
    made.a            = dw::data_of<const float>(residual);
    made.a_stride     = dw::stride_of(residual, 1);
    list.launch(x, (int) dst->ne[1], with.stream);
}

inline bool is_vector(const ggml_tensor * t, int64_t n) {
    return dw::is_f32(t) && ggml_is_contiguous(t) && ggml_nelements(t) == n;
}

inline bool is_weights(const ggml_tensor * t, int64_t width) {
    return is_product_type(t->type) && t->ne[0] == width && t->ne[2] == 1 && t->ne[3] == 1 &&
           width % ggml_blck_size(t->type) == 0 && (uintptr_t) t->data % 16 == 0;
}

inline bool is_rows(const ggml_tensor * t, int64_t n) {
    return dw::is_f32(t) && t->ne[0] % 32 == 0 && t->ne[1] == n && t->ne[2] == 1 && t->ne[3] == 1 && n >= 1 &&
           n <= max_rows && t->nb[1] % 16 == 0;
}

} // namespace dw::layer_parts
