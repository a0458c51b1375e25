// The product with an output head, whose strips lie whole: 16 rows of Q6_K, one behind the other. One block a
// multiprocessor stays resident and takes strip after strip. Two warps share a slot, into which one copy brings a
// strip, and each multiplies half of its tiles: no other warps meet. Sums are added in the order of products.cuh, so
// bits are the same. Test: tests/ops/test_cuda_layers.py, tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/door/chain.cuh"
#include "ops/layer-parts/product-parts.cuh"

namespace dw::layer_parts {

constexpr int tiles_of_large = 8, teams_of_large = 4, width_of_large = tiles_of_large * tile_values;
constexpr int large_pitch = tiles_of_large * (int) sizeof(block_q6_K), large_bytes = tile_rows * large_pitch;
// Pairs of warps of a block: an H200 is slower with five, seven and eight. Half of them ask for their first strip when
// x is there: the kernels that make x read memory, too.
constexpr int most_pairs = 6, early_pairs = 3;
constexpr int bounds_of_large = 512; // 128 registers a thread: a quarter is left for the kernels behind the head
static_assert(large_bytes % 16 == 0 && large_pitch % 4 == 0,
              "a strip is copied as it lies; tiles are even and odd in turn");

// Sums of a pair of warps, in shared memory: the first warp's of two turns, and the second one's.
template <int n_columns> constexpr int floats_of_pair = 3 * floats_of_sums<n_columns>;

// Tiles `first` and `first` + teams_of_large of a strip: what one warp of a team has.
template <typename sums_type, place_of_rows place>
__device__ __forceinline__ void add_tiles_of_large(sums_type & sums, const char * strip, int first, int lane) {
    using tile    = tile_of_Q6_K<place>;
    const char *a = strip + lane / 4 * large_pitch + first * sizeof(block_q6_K), *b = a + 8 * large_pitch;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        const int value = (first + i * teams_of_large) * tile_values,
                  at    = i * teams_of_large * (int) sizeof(block_q6_K);
        sums.add_tile(tile(a + at, b + at, lane), sums.template hold_tile<tile>(value, blocks_of_tile), value,
                      blocks_of_tile);
    }
}

// Rows of x in a block's shared memory. Lanes of one load meet different banks, and odd tiles' values are rotated.
struct rows_of_large {
    static constexpr int pitch = width_of_large + 16, pitch_of_scales = width_of_large / 32 + 2;
    scale_and_sum *      scales; // [n][pitch_of_scales]
    int8_t *             quants; // [n][pitch]

    static constexpr size_t    bytes(int n) { return n * (pitch_of_scales * sizeof(scale_and_sum) + pitch); }
    __device__ __forceinline__ rows_of_large(char * at, int n) :
        scales((scale_and_sum *) at),
        quants((int8_t *) (scales + n * pitch_of_scales)) {}
    __device__ __forceinline__ int8_t *        quants_of(int i) const { return quants + i * pitch; }
    __device__ __forceinline__ scale_and_sum * scales_of(int i) const { return scales + i * pitch_of_scales; }

    // All threads of a block.
    __device__ __forceinline__ void load(const activations & from, int n) const {
        constexpr int of_row = width_of_large / 16, of_scales = width_of_large / 64;
        for (int i = threadIdx.x; i < n * of_row; i += blockDim.x) {
            const int  row = i / of_row, at = i % of_row;
            const int4 x                  = ((const int4 *) from.quants_of(row))[at];
            ((int4 *) quants_of(row))[at] = at / (tile_values / 16) % 2 ? rotated(x) : x;
        }
        for (int i = threadIdx.x; i < n * of_scales; i += blockDim.x) {
            ((float4 *) scales_of(i / of_scales))[i % of_scales] =
                ((const float4 *) from.scales_of(i / of_scales))[i % of_scales];
        }
    }
};

template <int n_columns> __global__ void __launch_bounds__(bounds_of_large, 1)
    multiply_large(const __grid_constant__ part of, activations from, int n, int bytes_of_rows) {
    using sums_type = sums_of<n_columns>;
    extern __shared__ __align__(16) char memory[];
    __shared__ ptx::arrivals arrived[most_pairs];
    ggml_cuda_pdl_lc();
    const int    lane = threadIdx.x % 32, pair = threadIdx.x / 64, n_pairs = blockDim.x / 64;
    const bool   is_second = threadIdx.x / 32 % 2;
    char * const slot      = memory + pair * large_bytes;
    const int    n_strips = of.n_rows / tile_rows, step = n_pairs * gridDim.x;
    const auto   ask = [&](int strip) { // one lane
        if (strip < n_strips) {
            ptx::copy_span</*once*/ true>(slot, of.weights + (int64_t) strip * large_bytes, large_bytes,
                                            arrived + pair);
        }
    };
    int strip = pair * gridDim.x + blockIdx.x;
    if (lane == 0 && !is_second) {
        ptx::begin_arrivals(arrived + pair);
        if (pair < early_pairs) {
            ask(strip);
        }
    }
    __syncthreads();
    ggml_cuda_pdl_sync();
    char * const        at_rows = memory + n_pairs * large_bytes;
    const rows_of_large x(at_rows, n);
    if (lane == 0 && !is_second && pair >= early_pairs) {
        ask(strip);
    }
    x.load(from, n);
    __syncthreads();
    float * const   of_pair = (float *) (at_rows + bytes_of_rows) + pair * floats_of_pair<n_columns>;
    float * const   second  = of_pair + 2 * floats_of_sums<n_columns>;
    const sums_type none(x, lane, [&](int c) { return min(c, n - 1); });
#pragma unroll 1
    for (int turn = 0; strip < n_strips; ++turn, strip += step) {
        float * const first = of_pair + turn % 2 * floats_of_sums<n_columns>;
        float * const mine  = is_second ? second : first;
        ptx::wait_for_span(arrived + pair, turn);
        sums_type sums = none;
        add_tiles_of_large<sums_type, place_of_rows::even>(sums, slot, 2 * is_second, lane);
        sums.each([&](int column, int row, float sum) { mine[place_of_sum(column, row)] = sum; });
        sums = none;
        add_tiles_of_large<sums_type, place_of_rows::odd_by_rotated>(sums, slot, 2 * is_second + 1, lane);
        if (!is_second) {
            sums.each([&](int column, int row, float sum) { first[place_of_sum(column, row)] += sum; });
        }
        ptx::meet(1 + pair, 64);
        if (is_second) {
            sums.each([&](int column, int row, float sum) {
                const int place = place_of_sum(column, row);
                if (column < n) {
                    of.out[column * of.out_stride + strip * tile_rows + row] = first[place] + second[place] + sum;
                }
            });
        } else if (lane == 0) {
            ask(strip + step);
        }
    }
}

template <int n_columns>
static bool launch_large_of(const part & of, const activations & x, int n, cudaStream_t stream) {
    const int    bytes_of_rows = (int) rows_of_large::bytes(n);
    const size_t of_pair       = large_bytes + sizeof(float) * floats_of_pair<n_columns>;
    const int    n_pairs = std::min<int>(most_pairs, (int) ((shared_memory_of_block() - bytes_of_rows) / of_pair));
    if (n_pairs < most_pairs / 2) {
        return false;
    }
    dw::launch_kernel<multiply_large<n_columns>, /*keeps_shared*/ true>(
        { dim3(n_multiprocessors()), dim3(64 * n_pairs), n_pairs * of_pair + bytes_of_rows, stream }, of, x, n,
        bytes_of_rows);
    return true;
}

// Launches the product with n rows of x if it is one with a head whose strips lie whole, and says whether it did.
static bool launch_large(const part & of, const activations & x, int n, cudaStream_t stream) {
    if (of.type != GGML_TYPE_Q6_K || x.width != width_of_large || of.stride != large_pitch ||
        of.n_rows % tile_rows != 0 || of.n_rows < n_multiprocessors() * tile_rows * most_pairs ||
        of.end != end_of_product::as_is || !ptx::has_spans()) {
        return false;
    }
    // one row and two are done sooner by the code for eight
    return n <= 8 ? launch_large_of<8>(of, x, n, stream) : launch_large_of<16>(of, x, n, stream);
}

} // namespace dw::layer_parts
