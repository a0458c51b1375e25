// Outputs of networks of experts by whole strips of down, as in output-strips.cuh, of several rows: warps share the
// groups of a block. And the launch of all networks, by whichever kernels are for their weights. Test:
// tests/ops/test_cuda_layers.py, tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/hidden-strips.cuh"
#include "ops/layer-parts/output-strips.cuh"

namespace dw::layer_parts {

// A group in shared memory: where its strip is, and its pairs.
struct alignas(16) group_of_strips {
    pair_id      pairs[max_rows];
    const char * strip;
    int          n_pairs;
};

// The shared memory of a block behind its slots, of several rows. Group 0 is the shared network's.
struct strips_memory {
    group_of_strips *      groups;   // [most_groups]
    float *                found;    // [pairs][outputs_of_a_block]
    float *                residual; // [rows][outputs_of_a_block]
    float *                weights;  // [pairs]
    activations::quantised hidden;   // by pair

    static __host__ __device__ size_t hidden_at(int n, int n_pairs, int most_groups) {
        const size_t n_floats = (n_pairs + n) * outputs_of_a_block + n_pairs;
        return most_groups * sizeof(group_of_strips) + GGML_PAD(n_floats * sizeof(float), 16);
    }
    static size_t bytes_of_hidden(int n_pairs) { return activations::quantised::bytes(n_pairs, strip_values); }
    static size_t bytes(int n, int n_pairs, int most_groups) {
        return hidden_at(n, n_pairs, most_groups) + bytes_of_hidden(n_pairs);
    }

    __device__ __forceinline__ strips_memory(char * at, int n, int n_pairs, int most_groups) :
        groups((group_of_strips *) at),
        found((float *) (groups + most_groups)),
        residual(found + n_pairs * outputs_of_a_block),
        weights(residual + n * outputs_of_a_block),
        hidden(activations::quantised::in(at + hidden_at(n, n_pairs, most_groups), n_pairs, strip_values)) {}

    // All threads of a block: the groups of outputs from `first` on. ask(i, strip): called by a lane of warp i, if
    // there is one, as soon as group i's strip is known.
    template <typename ask_type>
    __device__ __forceinline__ void load(const arguments & a, int first, int most_groups, ask_type && ask) const {
        const int n_ranks = a.n_used + 1, n_warps = blockDim.x / 32, n = a.chosen->n_groups + 1;
        for (int i = threadIdx.x % 32 * n_warps + threadIdx.x / 32; i < most_groups; i += blockDim.x) {
            const int    place = i > 0 ? a.chosen->places[1][i - 1] : 0; // read before it is known whether it is there
            const int    of    = i > 0 ? a.chosen->n_pairs[i - 1] : a.n;
            const char * strip = (i > 0 ? a.routed : a.shared).down.row(place, first);
            if (i < n) {
                groups[i].strip   = strip;
                groups[i].n_pairs = of;
                ask(i, strip);
            }
        }
        for (int i = threadIdx.x; i < a.n * n_ranks; i += blockDim.x) {
            weights[i] = a.chosen->weights[i];
        }
        constexpr int of_group = max_rows * sizeof(pair_id) / sizeof(int4);
        for (int i = threadIdx.x; i < (n - 1) * of_group; i += blockDim.x) {
            ((int4 *) groups[1 + i / of_group].pairs)[i % of_group] = ((const int4 *) a.chosen->pairs)[i];
        }
        if (threadIdx.x < a.n) {
            groups[0].pairs[threadIdx.x] = (pair_id) (threadIdx.x * n_ranks + a.n_used);
        }
    }
};

// Outputs of a group's pairs, in n_columns columns, when its strip has come in this turn. A warp.
template <ggml_type type, int n_columns>
__device__ __forceinline__ void project_down_pairs(const strips_memory & at, const group_of_strips & g,
                                                   const char * slot, ptx::arrivals * arrived, int turn) {
    using sums_type = sums_of<n_columns>;
    const int lane  = threadIdx.x % 32;
    sums_type sums(at.hidden, lane, [&](int c) { return (int) g.pairs[min(c, g.n_pairs - 1)]; });
    columns_of_strip<type, sums_type> x;
    x.hold(sums);
    ptx::wait_for_span(arrived, turn);
    x.add_to(sums, slot, lane);
    sums.each([&](int column, int row, float sum) {
        if (column < g.n_pairs) {
            output_of(at.found, g.pairs[column], row) = sum;
        }
    });
}

// The same of the shared network's group, which has all rows.
template <ggml_type type, int n_columns> __device__ __forceinline__ void
project_down_shared(const strips_memory & at, const char * slot, ptx::arrivals * arrived) {
    if (n_columns == 8 && at.groups[0].n_pairs == 2) {
        project_down_pairs<type, 2>(at, at.groups[0], slot, arrived, 0);
    } else {
        project_down_pairs<type, n_columns>(at, at.groups[0], slot, arrived, 0);
    }
}

// The same of n groups. A warp begins with the one of its number, whose strip is on its way, and takes the next one
// whenever it is done with one. A shared network with a type of its own is in front of the loop: there it would take
// registers from the others.
template <typename strips, int n_columns> __device__ __forceinline__ void
project_down_groups(const strips_memory & at, int n, char * slot, ptx::arrivals * arrived, int & next) {
    int        i = threadIdx.x / 32, turn = 0;
    const auto take = [&] {
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            i = atomicAdd(&next, 1);
            if (i < n) {
                strips::ask(false, slot, at.groups[i].strip, arrived);
            }
        }
        i = __shfl_sync(0xffffffff, i, 0);
        ++turn;
    };
    if (!strips::are_equal && i == 0) {
        project_down_shared<strips::shared, n_columns>(at, slot, arrived);
        take();
    }
#pragma unroll 1
    while (i < n) {
        const group_of_strips & g = at.groups[i];
        with_columns_of_tile<n_columns>(g.n_pairs, [&](auto columns) {
            project_down_pairs<strips::routed, decltype(columns)::value>(at, g, slot, arrived, turn);
        });
        take();
    }
}

// As project_down_strips_alone, of several rows.
template <typename strips, int n_columns> __global__ void __launch_bounds__(32 * most_down_warps, 1)
    project_down_strips(const __grid_constant__ arguments a, int most_groups, int bytes_of_hidden, sum_of_networks to) {
    extern __shared__ __align__(128) char memory[];
    __shared__ ptx::arrivals arrived[most_down_warps + 1];
    __shared__ int           next;
    ggml_cuda_pdl_lc();
    const int           warp = threadIdx.x / 32, n_warps = blockDim.x / 32, lane = threadIdx.x % 32;
    const int           first = blockIdx.x * outputs_of_a_block, n_ranks = a.n_used + 1, n_pairs = a.n * n_ranks;
    char * const        slot = memory + warp * strips::slot_bytes;
    const strips_memory at(memory + n_warps * strips::slot_bytes, a.n, n_pairs, most_groups);
    if (lane == 0) {
        ptx::begin_arrivals(arrived + warp);
    }
    if (threadIdx.x == 0) {
        ptx::begin_arrivals(arrived + most_down_warps);
        next = n_warps;
    }
    __syncwarp();
    at.load(a, first, most_groups, [&](int i, const char * strip) {
        if (i < n_warps) {
            strips::ask(i == 0, slot, strip, arrived + warp);
        }
    });
    to.load(first, a.n, at.residual);
    const int n = a.chosen->n_groups + 1;
    __syncthreads();
    ggml_cuda_pdl_sync();
    if (threadIdx.x == 0) {
        ptx::copy_span</*once*/ false>(at.hidden.scales, a.hidden.scales, bytes_of_hidden, arrived + most_down_warps);
    }
    ptx::wait_for_span(arrived + most_down_warps, 0);
    project_down_groups<strips, n_columns>(at, n, slot, arrived + warp, next);
    __syncthreads();
    to.write(first, a.n, n_ranks, at.residual, at.weights, at.found);
}

// Of several rows.
template <typename strips, int n_columns> static bool launch_strips_of(const arguments & a, const dim3 & blocks,
                                                                       int n_groups, const sum_of_networks & to,
                                                                       cudaStream_t stream) {
    const int    n_pairs = a.n * (a.n_used + 1), most = n_groups + 1;
    const size_t others  = strips_memory::bytes(a.n, n_pairs, most);
    const int    wanted  = std::min(most_down_warps, most);
    int          n_warps = wanted;
    while (n_warps > 1 && n_warps * strips::slot_bytes + others > shared_memory_of_block()) {
        --n_warps; // a warp has all of a group, so bits stay
    }
    const size_t bytes = n_warps * strips::slot_bytes + others;
    if (bytes > shared_memory_of_block() || 2 * n_warps < wanted) {
        return false;
    }
    dw::launch_kernel<project_down_strips<strips, n_columns>>({ blocks, dim3(32 * n_warps), bytes, stream }, a, most,
                                                              (int) strips_memory::bytes_of_hidden(n_pairs), to);
    return true;
}

// Launches it where strips lie whole, of these types, and says whether it did.
template <ggml_type routed, ggml_type shared> static bool
launch_strips(const arguments & a, const dim3 & blocks, int n_groups, const sum_of_networks & to, cudaStream_t stream) {
    using strips = strips_of_layer<routed, shared>;
    if (!strips::lie_whole(a)) {
        return false;
    }
    if (a.n > 1) {
        return a.n <= 8 ? launch_strips_of<strips, 8>(a, blocks, n_groups, to, stream)
                        : launch_strips_of<strips, 16>(a, blocks, n_groups, to, stream);
    }
    return launch_strips_alone<strips>(a, blocks, to, stream);
}

// hidden values of all networks; h and the choice, or what it is made from, are there
static void launch_gated(const arguments & a, cudaStream_t stream) {
    const int n_groups = n_groups_of(a);
    if (!launch_hidden_strips(a, n_groups, stream)) {
        launch_hidden(a, n_groups, stream);
    }
}

// dst = x + the weighted sum of networks, behind launch_gated
static void launch_lowered(const arguments & a, const ggml_tensor * x, ggml_tensor * dst, cudaStream_t stream) {
    const int             n_groups = n_groups_of(a);
    const sum_of_networks to{ dw::data_of<const float>(x), dw::stride_of(x, 1), dw::data_of<float>(dst),
                              dw::stride_of(dst, 1) };
    const dim3            blocks((unsigned) (dst->ne[0] / outputs_of_a_block));
    if (launch_strips<GGML_TYPE_Q6_K, GGML_TYPE_Q6_K>(a, blocks, n_groups, to, stream) ||
        launch_strips<GGML_TYPE_Q4_K, GGML_TYPE_Q4_K>(a, blocks, n_groups, to, stream) ||
        launch_strips<GGML_TYPE_Q4_K, GGML_TYPE_Q6_K>(a, blocks, n_groups, to, stream)) {
        return;
    }
    if (a.n == 1) {
        launch_lower_of<1>(a, blocks, n_groups, to, stream);
    } else if (a.n <= 8) {
        launch_lower_of<8>(a, blocks, n_groups, to, stream);
    } else {
        launch_lower_of<16>(a, blocks, n_groups, to, stream);
    }
}

} // namespace dw::layer_parts
