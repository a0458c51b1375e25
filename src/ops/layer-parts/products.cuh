// Products of rows of activations with several weights in one launch, and the norm before them. A block multiplies 16
// rows of quantised weights, its warps parts of them; or of float weights a row a warp. Weights are asked for before
// the kernel waits for the one before it. Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/door/launch.h"
#include "ops/layer-parts/tiles.cuh"

namespace dw::layer_parts {

constexpr int most_warps = 8; // of a block of products
constexpr int max_parts  = 4;

enum class end_of_product { as_is, sigmoid, softplus, add };

// Weights [K, rows] and where their products go.
struct part {
    const char *   weights;
    int64_t        stride; // bytes of a row
    ggml_type      type;
    int            n_rows, first_block;
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

// row `row` of a part with float weights times n columns. A warp.
template <ggml_type type, int n_columns>
__device__ void multiply_row(const part & of, const activations & x, int row, int n, int lane) {
    const char * const rows[1] = { of.weights + row * of.stride };
    for (int c0 = 0; c0 < n; c0 += n_columns) {
        const float * columns[n_columns];
        float         sums[1][n_columns] = {};
#pragma unroll
        for (int c = 0; c < n_columns; ++c) {
            columns[c] = x.row(min(c0 + c, n - 1));
        }
        add_dots<type>(sums, rows, columns, x.width, lane);
        add_lanes(sums);
#pragma unroll
        for (int c = 0; c < n_columns; ++c) {
            if (lane == c && c0 + c < n) {
                of.out[(c0 + c) * of.out_stride + row] = ended(of, sums[0][c], row, c0 + c);
            }
        }
    }
}

// rows [first, first + 16) of a part with quantised weights times n columns. A block, its warps every so many pieces.
template <ggml_type type, int n_wide> __device__ void multiply_strip(const part & of, const activations & x, int first,
                                                                     int n, const tile_plan & plan, char * memory) {
    const int    warp = threadIdx.x / 32, n_warps = blockDim.x / 32, lane = threadIdx.x % 32;
    const int    n_pieces = (x.width + piece_values<type> - 1) / piece_values<type>;
    const int    n_mine   = (n_pieces - warp + n_warps - 1) / n_warps;
    const int    last_row = min(tile_rows, of.n_rows - first) - 1;
    const char * rows     = of.weights + first * of.stride;
    const auto   value_of = [&](int i) { return (warp + i * n_warps) * piece_values<type>; };
    const auto   piece_of = [&](int i) {
        const int value = value_of(i);
        return piece{ rows + value / 32 * (tiled<type>::bytes / 8), of.stride, last_row,
                      min(piece_values<type>, x.width - value) };
    };
    const lane_columns<n_wide> columns(x, lane, [&](int c) { return min(c, n - 1); });
    lane_sums<n_wide>          sums = {};
    for_each_piece<type>(
        memory + warp * plan.slots_of_a_warp, plan.n_slots, n_mine, lane, piece_of, [] { ggml_cuda_pdl_sync(); },
        [&](int i, const piece & each, const char * slot) {
            multiply_piece<type, n_wide>(sums, slot, each, columns, value_of(i), lane);
        });
    float * of_warps = (float *) (memory + n_warps * plan.slots_of_a_warp);
    store_sums(of_warps + warp * floats_of_sums<n_wide>, sums, lane);
    __syncthreads();
    for (int i = threadIdx.x; i < n * tile_rows; i += blockDim.x) {
        const int column = i / tile_rows, row = i % tile_rows;
        float     sum = 0.0f;
        for (int w = 0; w < n_warps; ++w) {
            sum += of_warps[w * floats_of_sums<n_wide> + place_of_sum(column, row)];
        }
        if (row <= last_row) {
            of.out[column * of.out_stride + first + row] = ended(of, sum, first + row, column);
        }
    }
}

template <int n_wide> __global__ void __launch_bounds__(32 * most_warps, n_wide == 1 ? 3 : 2)
    products(parts all, activations x, int n, tile_plan plan) {
    extern __shared__ __align__(16) char memory[];
    ggml_cuda_pdl_lc();
    const int block = blockIdx.x, warp = threadIdx.x / 32, n_warps = blockDim.x / 32, lane = threadIdx.x % 32;
    int       i = 0;
    while (i + 1 < all.n && block >= all.each[i + 1].first_block) {
        ++i;
    }
    const part & of = all.each[i];
    with_type(of.type, [&](auto type_is) {
        constexpr ggml_type type = decltype(type_is)::value;
        if constexpr (are_floats<type>) {
            const int row = n_warps * (block - of.first_block) + warp;
            ggml_cuda_pdl_sync();
            if (row < of.n_rows) {
                if (n == 1) {
                    multiply_row<type, 1>(of, x, row, n, lane);
                } else {
                    multiply_row<type, 4>(of, x, row, n, lane);
                }
            }
        } else {
            multiply_strip<type, n_wide>(of, x, tile_rows * (block - of.first_block), n, plan, memory);
        }
    });
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
        return n <= tile_columns ? launch_for<1>(x, n, stream) : launch_for<2>(x, n, stream);
    }

  private:
    template <int n_wide> void launch_for(const activations & x, int n, cudaStream_t stream) {
        const int n_warps  = std::clamp((x.width + 511) / 512, 1, most_warps); // 512 values a warp keep it busy
        int       n_blocks = 0;
        ggml_type types[max_parts];
        for (int i = 0; i < all_.n; ++i) {
            part & each      = all_.each[i];
            types[i]         = each.type;
            each.first_block = n_blocks;
            n_blocks += (int) dw::n_blocks(each.n_rows, is_float(each.type) ? n_warps : tile_rows);
        }
        const tile_launch with(types, all_.n, dw::n_blocks(x.width, n_warps), n_warps,
                               sizeof(float) * floats_of_sums<n_wide> * n_warps);
        CUDA_SET_SHARED_MEMORY_LIMIT(products<n_wide>, shared_memory_of_block());
        ggml_cuda_kernel_launch(products<n_wide>, { dim3(n_blocks), dim3(32 * n_warps), with.bytes, stream }, all_, x,
                                n, with.plan);
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
           width % ggml_blck_size(t->type) == 0 && (uintptr_t) t->data % 16 == 0 &&
           (is_float(t->type) || has_tile_products());
}

inline bool is_rows(const ggml_tensor * t, int64_t n) {
    return dw::is_f32(t) && t->ne[0] % 32 == 0 && t->ne[1] == n && t->ne[2] == 1 && t->ne[3] == 1 && n >= 1 &&
           n <= max_rows && t->nb[1] % 16 == 0;
}

} // namespace dw::layer_parts
