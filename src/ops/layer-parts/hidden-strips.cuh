// Hidden values of networks of experts as in networks.cuh, of several rows, where strips lie in spans: a block has all
// weights of its 32 values on their way at once. Test: tests/ops/test_cuda_layers.py,
// tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/networks.cuh"
#include "ops/layer-parts/spans.cuh"

namespace dw::layer_parts {

constexpr int strips_of_hidden = n_halves / halves_of_a_strip; // gate's two, up's two
constexpr int tiles_of_a_half = 4, width_of_hidden_strips = halves_of_a_strip * tiles_of_a_half * tile_values;
constexpr int most_rows_of_hidden_strips = 6; // of more, smaller blocks are faster
constexpr int n_blocks_at_once = 2; // on a multiprocessor: cards with less shared memory keep to make_hidden_all
static_assert(strip_of_spans::n_spans % halves_of_a_strip == 0, "warps of a strip ask for as many spans each");

// A group, as a warp reads it.
struct group_of_lane {
    int place, n_pairs; // of gate and up; 0 pairs: there is none
    int pair;           // of lane % max_rows, valid below n_pairs

    __device__ __forceinline__ static group_of_lane of_all_rows(const arguments & a) {
        return { 0, a.n, (int) threadIdx.x % (int) max_rows * (a.n_used + 1) + a.n_used };
    }
    __device__ __forceinline__ static group_of_lane of_record(const group_record & of) {
        constexpr int n_words = sizeof(of) / sizeof(int), pairs_at = offsetof(group_record, pairs) / sizeof(int);
        const int     lane = threadIdx.x % 32, word = lane < n_words ? ((const int *) &of)[lane] : 0;
        const int     two = __shfl_sync(0xffffffff, word, pairs_at + lane % (int) max_rows / 2);
        return { __shfl_sync(0xffffffff, word, 0), __shfl_sync(0xffffffff, word, 1),
                 (lane % 2 ? two >> 16 : two) & 0xffff };
    }
};

// As make_hidden_all. Blocks: (32 hidden values, group), a warp a half of a strip. Each block waits for the kernel
// before this one and only then lets the next one start: project_down_strips, and the next layer's dw_expert_slots,
// read what older kernels wrote before their own wait.
template <ggml_type type, int n_columns> __global__ void __launch_bounds__(32 * n_halves, n_blocks_at_once)
    make_hidden_strips(const __grid_constant__ arguments a) {
    extern __shared__ __align__(128) char strips[];
    __shared__ ptx::arrivals arrived[strips_of_hidden];
    const int                warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int                number = warp / halves_of_a_strip, half = warp % halves_of_a_strip;
    const int  index = (int) blockIdx.y - 1, begin = blockIdx.x * hidden_of_a_block; // group -1: the shared network's
    const auto wait = [] {
        ggml_cuda_pdl_sync();
        ggml_cuda_pdl_lc();
    };
    if (threadIdx.x < strips_of_hidden) {
        ptx::begin_arrivals(arrived + threadIdx.x, strip_of_spans::n_spans);
    }
    // All but the expert is known before the choice is.
    const network & of        = index < 0 ? a.shared : a.routed;
    const matrix &  weights   = number < 2 ? of.gate : of.up;
    const int       row_bytes = (int) weights.row_stride;
    const char *    from      = weights.row(0, (number < 2 ? 0 : of.first_up) + begin + number % 2 * tile_rows);
    const int64_t   stride    = weights.expert_stride;
    char * const    strip     = strips + number * strip_of_spans::bytes(row_bytes);
    __syncthreads();
    group_of_lane g = group_of_lane::of_all_rows(a);
    if (index >= 0) {
        wait();
        g = group_of_lane::of_record(a.chosen->records[index]);
    }
    if (g.n_pairs == 0 || begin >= of.width) {
        return;
    }
    constexpr int n_mine = strip_of_spans::n_spans / halves_of_a_strip;
    if (lane < n_mine) {
        strip_of_spans::ask(strip, from + g.place * stride, row_bytes, half * n_mine + lane, arrived + number);
    }
    if (index < 0) {
        wait();
    }
    const int row_of_lane = g.pair / (a.n_used + 1);
    float *   of_halves   = (float *) (strips + strips_of_hidden * strip_of_spans::bytes(row_bytes));
    with_columns_of_tile<n_columns>(g.n_pairs, [&](auto columns) {
        constexpr int n = decltype(columns)::value;
        sums_of<n> sums(a.h, lane, [&](int c) { return __shfl_sync(0xffffffff, row_of_lane, min(c, g.n_pairs - 1)); });
        multiply_spans<type, tiles_of_a_half>(sums, strip, row_bytes, lane, arrived + number, [&](int t) {
            return (t / 2 * halves_of_a_strip + half) * tiled<type>::n_values + t % 2 * tile_values;
        });
        store_sums_of_spans(of_halves + warp * floats_of_sums<n>, sums);
        __syncthreads();
        for (int i = warp; i < g.n_pairs; i += n_halves) {
            store_hidden<n>(a, of_halves, i, __shfl_sync(0xffffffff, g.pair, i), begin);
        }
    });
}

// Launches it where strips lie in spans, and says whether it did. n_groups: the shared network's not counted
static bool launch_hidden_strips(const arguments & a, int n_groups, cudaStream_t stream) {
    constexpr int       n_columns = 8;
    constexpr ggml_type type      = GGML_TYPE_Q4_K;
    const auto          lies      = [](const matrix & of) {
        return of.width == width_of_hidden_strips && lies_in_spans(of.type, of.width, of.row_stride);
    };
    const size_t of_sums   = sizeof(float) * n_halves * floats_of_sums<n_columns>;
    const size_t bytes     = strips_of_hidden * strip_of_spans::bytes((int) a.routed.gate.row_stride) + of_sums;
    const bool   have_room = n_blocks_at_once * bytes <= shared_memory_of_block();
    if (a.n == 1 || a.n > most_rows_of_hidden_strips || !a.chosen || !lies(a.routed.gate) || !lies(a.routed.up) ||
        !lies(a.shared.gate) || !lies(a.shared.up) || !have_room) {
        return false;
    }
    const dim3 blocks(dw::n_blocks(std::max(a.routed.width, a.shared.width), hidden_of_a_block), n_groups + 1);
    dw::launch_kernel<make_hidden_strips<type, n_columns>>({ blocks, dim3(32 * n_halves), bytes, stream }, a);
    return true;
}

} // namespace dw::layer_parts
