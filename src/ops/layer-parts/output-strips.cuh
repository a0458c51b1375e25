// Outputs of networks of experts as in outputs.cuh, where down's strips lie whole: 16 rows of 512 values of Q6_K or
// Q4_K, one behind the other, which one copy brings into shared memory as they are. So it is known which tiles of Q6_K
// are even. The shared expert's are of the routed ones' type, or of Q6_K beside Q4_K. Here: what strips are, and the
// kernel of one row; of several rows: group-strips.cuh. Test: tests/ops/test_cuda_layers.py,
// tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/outputs.cuh"

namespace dw::layer_parts {

constexpr int tiles_of_strip = 2, strip_values = tiles_of_strip * tile_values;

// How rows of a type lie in a strip, and what their tiles are.
template <typename block, typename first_tile, typename second_tile> struct strip_of_blocks {
    using first                     = first_tile;
    using second                    = second_tile;
    static constexpr int tile_bytes = sizeof(block), pitch = tiles_of_strip * tile_bytes, bytes = tile_rows * pitch;
    static_assert(bytes % 16 == 0 && pitch % 4 == 0, "strips are copied as they lie");
};

template <ggml_type type> struct whole_strip;

template <> struct whole_strip<GGML_TYPE_Q6_K>
    : strip_of_blocks<block_q6_K, tile_of_Q6_K<place_of_rows::even>, tile_of_Q6_K<place_of_rows::odd>> {
    static_assert(tile_bytes % 4 == 2, "a row's first tile is even, its second one is odd");
};

// Rows are 8 banks apart, which is what four lanes read of one.
template <> struct whole_strip<GGML_TYPE_Q4_K>
    : strip_of_blocks<block_q4_K, unpacked<GGML_TYPE_Q4_K>, unpacked<GGML_TYPE_Q4_K>> {
    static_assert(tile_bytes % 16 == 0 && pitch % 128 == 32, "heads are read at once, nibbles from all banks");
};

template <ggml_type type> static bool lies_in_strips(const matrix & of) {
    return of.type == type && of.width == strip_values && of.row_stride == whole_strip<type>::pitch &&
           (uintptr_t) of.data % 16 == 0 && of.expert_stride % 16 == 0;
}

// What a lane needs of columns for a strip.
template <ggml_type type, typename sums_type> struct columns_of_strip {
    using of = whole_strip<type>;
    typename sums_type::held x[tiles_of_strip];

    __device__ __forceinline__ void hold(const sums_type & sums) {
        x[0] = sums.template hold_tile<typename of::first>(0, blocks_of_tile);
        x[1] = sums.template hold_tile<typename of::second>(tile_values, blocks_of_tile);
    }

    // sums += the strip times them
    __device__ __forceinline__ void add_to(sums_type & sums, const char * strip, int lane) const {
        const char *a = strip + lane / 4 * of::pitch, *b = a + 8 * of::pitch;
        if constexpr (sums_type::n_columns > 2 && std::is_same_v<typename of::first, typename of::second>) {
#pragma unroll 1 // both at once take more registers than there are
            for (int t = 0; t < tiles_of_strip; ++t, a += of::tile_bytes, b += of::tile_bytes) {
                sums.add_tile(typename of::first(a, b, lane), x[0], t * tile_values, blocks_of_tile);
            }
        } else {
            sums.add_tile(typename of::first(a, b, lane), x[0], 0, blocks_of_tile);
            a += of::tile_bytes;
            b += of::tile_bytes;
            sums.add_tile(typename of::second(a, b, lane), x[1], tile_values, blocks_of_tile);
        }
    }
};

// What a layer's strips are: of the routed experts, and of the shared one.
template <ggml_type routed_type, ggml_type shared_type> struct strips_of_layer {
    static constexpr ggml_type routed = routed_type, shared = shared_type;
    static constexpr bool      are_equal    = routed == shared;
    static constexpr int       routed_bytes = whole_strip<routed>::bytes, shared_bytes = whole_strip<shared>::bytes;
    static constexpr int       slot_bytes = routed_bytes > shared_bytes ? routed_bytes : shared_bytes; // holds either

    // One lane: asks for a strip.
    static __device__ __forceinline__ void ask(bool is_shared, char * slot, const char * from,
                                               ptx::arrivals * arrived) {
        ptx::copy_span</*once*/ true>(slot, from, is_shared ? shared_bytes : routed_bytes, arrived);
    }

    static bool lie_whole(const arguments & a) {
        return ptx::has_spans() && lies_in_strips<routed>(a.routed.down) && lies_in_strips<shared>(a.shared.down) &&
               a.hidden.width == strip_values;
    }
};

// Outputs of a pair, from its strip in a slot. A warp. Its first pass brings instructions into caches: what that reads
// is arbitrary, and its sums do not count.
template <ggml_type type> __device__ __forceinline__ void
project_down_alone(const activations & hidden, int pair, const char * slot, ptx::arrivals * arrived, float * found) {
    using sums_type                        = sums_of<1, false>;
    const int                         lane = threadIdx.x % 32;
    const sums_type                   none(hidden, lane, [&](int) { return pair; });
    columns_of_strip<type, sums_type> columns{};
#pragma unroll 1
    for (int pass = -1; pass < 1; ++pass) {
        if (pass == 0) {
            ggml_cuda_pdl_sync();
            columns.hold(none);
            ptx::wait_for_span(arrived, 0);
        }
        sums_type sums = none;
        columns.add_to(sums, slot, lane);
        sums.each([&](int, int row, float sum) { output_of(found, pair, row) = sum; });
    }
}

// dst = x + the weighted sum of down hidden, of one row. Blocks: outputs_of_a_block outputs; a warp the shared network
// or a rank. The choice and x are read, and strips asked for, before the kernel in front of this one ends.
template <typename strips> __global__ void __launch_bounds__(bounds_of_neighbours, 1)
    project_down_strips_alone(const __grid_constant__ arguments a, sum_of_networks to) {
    extern __shared__ __align__(128) char memory[];
    __shared__ choice_of_row              own;
    __shared__ ptx::arrivals arrived[max_used + 1];
    ggml_cuda_pdl_lc();
    const int     warp = threadIdx.x / 32, n_ranks = a.n_used + 1, lane = threadIdx.x % 32;
    const int     first = blockIdx.x * outputs_of_a_block, pair = warp == 0 ? a.n_used : warp - 1;
    float * const found    = (float *) (memory + n_ranks * strips::slot_bytes);
    float * const residual = found + n_ranks * outputs_of_a_block;
    char * const  slot     = memory + warp * strips::slot_bytes;
    if (lane == 0) {
        ptx::begin_arrivals(arrived + warp);
        if (warp == 0) {
            strips::ask(true, slot, a.shared.down.row(0, first), arrived);
        }
    }
    to.load(first, 1, residual);
    if (warp == 1) {
        choose_alone<1>(a, a.n_used, own);
    }
    __syncthreads();
    if (warp > 0 && lane == 0) {
        await_rank<1>(a, warp - 1, own);
        strips::ask(false, slot, a.routed.down.row(own.experts[warp - 1], first), arrived + warp);
    }
    if (strips::are_equal || warp > 0) {
        project_down_alone<strips::routed>(a.hidden, pair, slot, arrived + warp, found);
    } else {
        project_down_alone<strips::shared>(a.hidden, pair, slot, arrived + warp, found);
    }
    __syncthreads();
    to.write(first, 1, n_ranks, residual, own.weights, found);
}

// Of one row. Says whether it was launched.
template <typename strips> static bool launch_strips_alone(const arguments & a, const dim3 & blocks,
                                                           const sum_of_networks & to, cudaStream_t stream) {
    const int    n_ranks = a.n_used + 1;
    const size_t bytes   = n_ranks * strips::slot_bytes + sizeof(float) * (n_ranks + 1) * outputs_of_a_block;
    if (bytes > shared_memory_of_block()) {
        return false;
    }
    dw::launch_kernel<project_down_strips_alone<strips>, true>({ blocks, dim3(32 * n_ranks), bytes, stream }, a, to);
    return true;
}

} // namespace dw::layer_parts
