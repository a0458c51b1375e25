// Copies of pieces on CUDA: copies.h. A kernel reads small ones, over the bus too; the copy engine has the large ones.

#include "common.cuh"
#include "ops/copies/copies.cuh"
#include "ops/door/chain.cuh"

#include <algorithm>

namespace {

constexpr int    n_threads = 256, most_blocks = 16;
constexpr int    most_at_once   = 48;      // pieces of a launch, 24 bytes of its arguments each
constexpr size_t least_of_large = 1 << 16; // bytes

struct piece_list {
    dw::piece each[most_at_once];
};

template <typename word> __device__ void copy_words(const dw::piece & of) {
    const size_t n = of.n_bytes / sizeof(word);
    for (size_t i = (size_t) blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t) gridDim.x * blockDim.x) {
        ((word *) of.to)[i] = ((const word *) of.from)[i];
    }
}

// blocks: (part, piece)
__global__ void copy_all(const piece_list pieces) {
    const dw::piece & of  = pieces.each[blockIdx.y];
    const uintptr_t   odd = (uintptr_t) of.to | (uintptr_t) of.from | of.n_bytes;
    if (odd % sizeof(uint4) == 0) {
        copy_words<uint4>(of);
    } else if (odd % sizeof(uint32_t) == 0) {
        copy_words<uint32_t>(of);
    } else {
        copy_words<char>(of);
    }
}

void copy_small(const piece_list & pieces, int n, size_t most_bytes, cudaStream_t stream) {
    if (n > 0) {
        const size_t of_a_block = n_threads * sizeof(uint4);
        const int    n_blocks   = (int) std::min<size_t>((most_bytes + of_a_block - 1) / of_a_block, most_blocks);
        dw::set_attributes<copy_all, /*keeps_shared*/ true, /*has_dynamic*/ false>();
        copy_all<<<dim3(n_blocks, n), dim3(n_threads), 0, stream>>>(pieces);
    }
}

} // namespace

void dw::copy_pieces(const piece * pieces, int n, cudaStream_t stream) {
    piece_list small{};
    int        n_small = 0;
    size_t     most    = 0;
    for (int i = 0; i < n; ++i) {
        const piece & each = pieces[i];
        if (each.n_bytes >= least_of_large) {
            CUDA_CHECK(cudaMemcpyAsync(each.to, each.from, each.n_bytes, cudaMemcpyDefault, stream));
        } else if (each.n_bytes > 0) {
            small.each[n_small++] = each;
            most                  = std::max(most, each.n_bytes);
        }
        if (n_small == most_at_once) {
            copy_small(small, n_small, most, stream);
            n_small = 0;
            most    = 0;
        }
    }
    copy_small(small, n_small, most, stream);
}
