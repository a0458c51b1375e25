// Shared memory where a chunk's keys and values of Q8_0 arrive while the chunk before is computed: in registers their
// blocks of 34 bytes would take loads of 2 and 4 bytes from far away. Must not know: what is computed of them.
// Test: tests/ops/layer_kernels.py.

#pragma once

#include "ops/door/ptx.cuh"
#include "ops/layer-parts/attention-parts.h"
#include "ops/layer-parts/cached-values.cuh"

namespace dw::layer_parts {

template <ggml_type type, int size> class chunk_stage {
    static constexpr int row = bytes_of<type, size>, n_pieces = row / 16, n_rows = cells_of_a_chunk;

  public:
    // Rows of other sizes are no multiples of 16 bytes, which a copy takes.
    static constexpr bool   is_used = type == GGML_TYPE_Q8_0 && row % 16 == 0;
    static constexpr size_t bytes   = is_used ? 2 * n_rows * row : 0; // of a block's dynamic shared memory

    __device__ __forceinline__ explicit chunk_stage(char * memory) :
        keys_(memory) {}

    // Asks for the cells from `first` on, the last one of n_cells again behind it. All threads of a block; what was
    // here has been read.
    __device__ __forceinline__ void copy(const strided_rows & k, const strided_rows & v, int first, int n_cells) const {
        const ptx::shared_address keys = ptx::address_of(keys_);
        for (int i = threadIdx.x; i < n_rows * n_pieces; i += blockDim.x) {
            const int cell = min(first + i / n_pieces, n_cells - 1), at = i % n_pieces * 16;
            ptx::copy_16</*once*/ false>(keys + i * 16, k.at(cell) + at);
            ptx::copy_16</*once*/ false>(keys + (n_rows * n_pieces + i) * 16, v.at(cell) + at);
        }
        ptx::end_of_copies();
    }

    // Until all that was asked for is there for all threads of the block.
    __device__ __forceinline__ static void wait() {
        ptx::wait_for_copies<0>();
        __syncthreads();
    }

    // of the chunk's i-th cell
    __device__ __forceinline__ const char * key(int i) const { return keys_ + i * row; }
    __device__ __forceinline__ const char * value(int i) const { return keys_ + (n_rows + i) * row; }

  private:
    char * keys_; // and values
};

} // namespace dw::layer_parts
