// Products of rows of activations with several weights in one launch. A block multiplies 16 rows of quantised weights,
// its warps parts of them, or of float weights a row a warp. Weights are asked for before the kernel waits for the one
// before it. One row of activations is made by each block for itself, more rows by a kernel before.
// Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/door/launch.h"
#include "ops/layer-parts/inputs.cuh"
#include "ops/layer-parts/pieces.cuh"

#include <array>
#include <climits>

namespace dw::layer_parts {

constexpr int most_warps = 8; // of a block of products
constexpr int max_parts  = 4;
constexpr int large_rows = 1 << 14; // an output head
constexpr int few_rows   = 512;     // of float weights: a warp a row would leave most of a GPU idle

enum class end_of_product { as_is, sigmoid, softplus, add };

// Weights [K, rows] and where their products go.
struct part {
    const char *   weights;
    int64_t        stride; // bytes of a row
    ggml_type      type;
    int            n_rows, first_block, n_blocks;
    int            n_shares; // warps of a row of float weights, which share the columns
    float *        out;      // [n][out_stride]
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

// Row `row` of a part with float weights times columns [first, last). A warp.
template <ggml_type type, int n_columns>
__device__ void multiply_row(const part & of, const activations & x, int row, int first, int last, int lane) {
    const char * const rows[1] = { of.weights + row * of.stride };
    for (int c0 = first; c0 < last; c0 += n_columns) {
        const float * columns[n_columns];
        float         sums[1][n_columns] = {};
#pragma unroll
        for (int c = 0; c < n_columns; ++c) {
            columns[c] = x.row(min(c0 + c, last - 1));
        }
        add_dots<type>(sums, rows, columns, x.width, lane);
        add_lanes(sums);
#pragma unroll
        for (int c = 0; c < n_columns; ++c) {
            if (lane == c && c0 + c < last) {
                of.out[(c0 + c) * of.out_stride + row] = ended(of, sums[0][c], row, c0 + c);
            }
        }
    }
}

// Rows [first, first + 16) of a part, from the sums of the block's warps.
template <int n_columns>
__device__ __forceinline__ void write_strip(const part & of, const float * of_warps, int first, int n) {
    const int n_warps = blockDim.x / 32;
    for (int i = threadIdx.x; i < n * tile_rows; i += blockDim.x) {
        const int column = i / tile_rows, row = first + i % tile_rows;
        float     sum = 0.0f;
        for (int w = 0; w < n_warps; ++w) {
            sum += of_warps[w * floats_of_sums<n_columns> + place_of_sum(column, i % tile_rows)];
        }
        if (row < of.n_rows) {
            of.out[column * of.out_stride + row] = ended(of, sum, row, column);
        }
    }
}

// A part with quantised weights times n columns: strips of 16 rows, from strip `first` on every `step`-th. A block, its
// warps every so many pieces of each strip. ready(): the activations, when they are there.
template <ggml_type type, int n_columns, typename ready_type>
__device__ void multiply_strips(const part & of, int width, int first, int step, int n, const tile_plan & plan,
                                char * memory, ready_type && ready) {
    const int  warp = threadIdx.x / 32, n_warps = blockDim.x / 32, lane = threadIdx.x % 32;
    const int  n_strips = (of.n_rows + tile_rows - 1) / tile_rows, n_mine = (n_strips - first + step - 1) / step;
    const auto strip_of = [&](int i) {
        const int row = (first + i * step) * tile_rows;
        return strip{ of.weights + row * of.stride, (int) of.stride, min(tile_rows, of.n_rows - row) - 1, width };
    };
    strips_of_warp<type, decltype(strip_of)> strips(memory + warp * plan.slots_of_a_warp, plan.n_slots, n_mine, width,
                                                    warp, n_warps, strip_of);
    const activations                        x        = ready();
    float *                                  of_warps = (float *) (memory + n_warps * plan.slots_of_a_warp);
    for (int i = 0; i < n_mine; ++i) {
        sums_of<n_columns> sums(x, lane, [&](int c) { return min(c, n - 1); });
        strips.multiply(sums, i);
        store_sums(of_warps + warp * floats_of_sums<n_columns>, sums);
        __syncthreads();
        write_strip<n_columns>(of, of_warps, (first + i * step) * tile_rows, n);
        __syncthreads();
    }
}

// blocks of most_warps that the registers of a multiprocessor are for
template <int n_columns> constexpr int blocks_with_registers = n_columns == 1 ? 4 : n_columns <= 8 ? 3 : 2;

// own: where a block's memory has room for the activations that it makes of `input`
template <int n_columns, typename input_type>
__global__ void __launch_bounds__(32 * most_warps, blocks_with_registers<n_columns>)
    products(const __grid_constant__ parts all, input_type input, int width, int n, tile_plan plan, int own) {
    extern __shared__ __align__(16) char memory[];
    ggml_cuda_pdl_lc();
    const int block = blockIdx.x, warp = threadIdx.x / 32, n_warps = blockDim.x / 32, lane = threadIdx.x % 32;
    int       i = 0;
    while (i + 1 < all.n && block >= all.each[i + 1].first_block) {
        ++i;
    }
    const part & of    = all.each[i];
    const auto   ready = [&] {
        ggml_cuda_pdl_sync();
        if constexpr (std::is_same_v<input_type, activations>) {
            return input;
        } else {
            const activations made = activations::in(memory + own, 1, width);
            input.write(0, whole_row, made);
            __syncthreads();
            return made;
        }
    };
    with_type(of.type, [&](auto type_is) {
        constexpr ggml_type type = decltype(type_is)::value;
        if constexpr (are_floats<type>) {
            const int         task = n_warps * (block - of.first_block) + warp, row = task / of.n_shares;
            const activations x = ready();
            if (row < of.n_rows) {
                const int columns = (n + of.n_shares - 1) / of.n_shares, first = task % of.n_shares * columns;
                const int last = min(first + columns, n);
                if (n_columns == 1 || of.n_shares > 1) {
                    multiply_row<type, n_columns == 1 ? 1 : 2>(of, x, row, first, last, lane);
                } else {
                    multiply_row<type, n_columns == 1 ? 1 : 4>(of, x, row, first, last, lane);
                }
            }
        } else {
            multiply_strips<type, n_columns>(of, width, block - of.first_block, of.n_blocks, n, plan, memory, ready);
        }
    });
}

// Launch-time description of the parts. Each file has its own: a limit of shared memory is set for a file's kernels.
namespace {
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

    // n rows of activations of this width, made of `input`, in memory for activations::bytes(n, width)
    template <typename input_type>
    void launch(const input_type & input, void * memory, int64_t width, int n, cudaStream_t stream) {
        if constexpr (input_type::by_products) {
            if (n == 1 && input.can_be_made_by(32 * warps_for(width)) && leaves_room_for_input(width)) {
                return launch_for<1>(input, (int) width, n, stream);
            }
        }
        const activations x = activations::in((char *) memory, n, width);
        launch_input(input, x, n, stream);
        launch(x, n, stream);
    }

    // x: n rows
    void launch(const activations & x, int n, cudaStream_t stream) {
        if (n <= 2) {
            return n == 1 ? launch_for<1>(x, x.width, n, stream) : launch_for<2>(x, x.width, n, stream);
        }
        return n <= 8 ? launch_for<8>(x, x.width, n, stream) : launch_for<16>(x, x.width, n, stream);
    }

  private:
    static int warps_for(int64_t width) {
        return (int) std::clamp<int64_t>((width + 511) / 512, 1, most_warps); // 512 values a warp keep it busy
    }

    std::array<ggml_type, max_parts> types() const {
        std::array<ggml_type, max_parts> found{};
        for (int i = 0; i < all_.n; ++i) {
            found[i] = all_.each[i].type;
        }
        return found;
    }

    template <int n_columns, typename input_type>
    void launch_for(const input_type & input, int width, int n, cudaStream_t stream) {
        constexpr bool    makes_input = !std::is_same_v<input_type, activations>;
        const int         n_warps     = warps_for(width);
        const size_t      of_sums     = sizeof(float) * floats_of_sums<n_columns> * n_warps;
        const size_t      others      = of_sums + (makes_input ? activations::bytes(1, width) : 0);
        const bool        is_large    = all_.each[0].n_rows >= large_rows; // a block multiplies several strips
        const tile_launch with(types().data(), all_.n, is_large ? INT_MAX : dw::n_blocks(width, n_warps), n_warps,
                               others);
        const int         own      = (int) (with.bytes - others + of_sums);
        const int         n_blocks = share_blocks(n, n_warps, blocks_at_once<n_columns>(n_warps, with.bytes));
        CUDA_SET_SHARED_MEMORY_LIMIT((products<n_columns, input_type>), shared_memory_of_block());
        ggml_cuda_kernel_launch(products<n_columns, input_type>,
                                { dim3(n_blocks), dim3(32 * n_warps), with.bytes, stream }, all_, input, width, n,
                                with.plan, own);
    }

    // whether a block has shared memory for one row of activations beside what it multiplies
    bool leaves_room_for_input(int64_t width) const {
        const int    n_warps = warps_for(width);
        const size_t others  = sizeof(float) * floats_of_sums<1> * n_warps + activations::bytes(1, width);
        return tile_launch(types().data(), all_.n, 0, n_warps, others).bytes <= shared_memory_of_block();
    }

    // Blocks that a GPU runs together.
    template <int n_columns> static int blocks_at_once(int n_warps, size_t bytes) {
        const int by_registers = most_warps * blocks_with_registers<n_columns> / n_warps;
        const int by_memory    = (int) (shared_memory_of_block() / (bytes + 1024));
        return std::max(1, std::min(by_registers, by_memory)) * ggml_cuda_info().devices[ggml_cuda_get_device()].nsm;
    }

    // Gives each part its blocks, and returns their number: a block a strip, but for large parts.
    int share_blocks(int n, int n_warps, int at_once) {
        int n_blocks = 0;
        for (int i = 0; i < all_.n; ++i) {
            part & each      = all_.each[i];
            each.first_block = n_blocks;
            each.n_shares    = each.n_rows <= few_rows ? (n + 1) / 2 : 1;
            each.n_blocks    = (int) (is_float(each.type) ? dw::n_blocks(each.n_rows * each.n_shares, n_warps)
                                                          : dw::n_blocks(each.n_rows, tile_rows));
            if (!is_float(each.type) && each.n_rows >= large_rows && each.n_blocks > at_once) {
                each.n_blocks = at_once;
            }
            n_blocks += each.n_blocks;
        }
        return n_blocks;
    }

    parts all_{};
};
} // namespace

// dst = residual + weights x, x as of product_list::launch
template <typename input_type> static void add_product(const dw::launch_context & with, ggml_tensor * dst,
                                                       const ggml_tensor * weights, const ggml_tensor * residual,
                                                       const input_type & input) {
    product_list list;
    part &       made = list.add(weights, dw::data_of<float>(dst), dw::stride_of(dst, 1));
    made.end          = end_of_product::add;
    made.a            = dw::data_of<const float>(residual);
    made.a_stride     = dw::stride_of(residual, 1);
    if constexpr (std::is_same_v<input_type, activations>) {
        list.launch(input, (int) dst->ne[1], with.stream);
    } else {
        list.launch(input, with.workspace, weights->ne[0], (int) dst->ne[1], with.stream);
    }
}

inline bool is_vector(const ggml_tensor * t, int64_t n) {
    return dw::is_f32(t) && ggml_is_contiguous(t) && ggml_nelements(t) == n;
}

inline bool is_weights(const ggml_tensor * t, int64_t width) {
    return is_product_type(t->type) && t->ne[0] == width && t->ne[2] == 1 && t->ne[3] == 1 &&
           width % ggml_blck_size(t->type) == 0 && (uintptr_t) t->data % 16 == 0 &&
           (is_float(t->type) || ptx::has_products());
}

inline bool is_rows(const ggml_tensor * t, int64_t n) {
    return dw::is_f32(t) && t->ne[0] % 32 == 0 && t->ne[1] == n && t->ne[2] == 1 && t->ne[3] == 1 && n >= 1 &&
           n <= max_rows && t->nb[1] % 16 == 0;
}

} // namespace dw::layer_parts
