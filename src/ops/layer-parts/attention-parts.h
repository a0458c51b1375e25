// In which parts attention sums over cells of a KV cache: chunks of 64 cells, and parts of several chunks, more the
// further a cell is from the first one. A part is what a block of threads sums up. Where parts begin depends on nothing
// else, so that a row's sums have the same bits whatever the rows beside it and the size of the cache.
// Must not know: devices. Test: tests/ops/layer_kernels.py.

#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define DW_ON_BOTH __host__ __device__
#else
#define DW_ON_BOTH
#endif

namespace dw::layer_parts {

constexpr int cells_of_a_chunk = 64, n_smallest_parts = 64;

// chunks [first, first + n)
struct attention_part {
    int first, n;

    // Parts of 64, 256, 512, 1,024 and 2,048 cells, the larger ones behind 4,096, 16,384, 65,536 and 131,072 cells: few
    // cells are shared by many blocks, and many leave few sums to add up.
    static DW_ON_BOTH attention_part of(int i) {
        return i < n_smallest_parts ? attention_part{ i, 1 }
               : i < 112            ? attention_part{ 64 + 4 * (i - 64), 4 }
               : i < 208            ? attention_part{ 256 + 8 * (i - 112), 8 }
               : i < 272            ? attention_part{ 1024 + 16 * (i - 208), 16 }
                                    : attention_part{ 2048 + 32 * (i - 272), 32 };
    }
};

inline int n_attention_parts(int64_t n_cells) {
    const int64_t n_chunks = (n_cells + cells_of_a_chunk - 1) / cells_of_a_chunk;
    int           n        = 0;
    while (attention_part::of(n).first < n_chunks) {
        ++n;
    }
    return n;
}

#undef DW_ON_BOTH

} // namespace dw::layer_parts
