// What the kernels that fill slots share: a layer's table with a thread an expert, and copies from the host.
// Included by .cu files alone. Test: tests/ops/slot_kernels.py.

#pragma once

#include "common.cuh"
#include "ops/expert-slots/expert-slots.h"
#include "ops/expert-slots/policy.h"

namespace dw::expert_slots {

constexpr int n_lanes        = 32;
constexpr int n_fetch_blocks = 16; // enough for a PCIe 5 link; the step's own kernels have the other multiprocessors
constexpr int n_fill_blocks  = 64; // 16 x 256 threads with 4 loads of 16 bytes each fill a PCIe 5 link
constexpr int n_fill_threads = 256;
constexpr int n_loads        = 4; // of a thread, in flight together

// threads of a block that has one for each expert
inline int threads_for(const layer & of) {
    return (of.n_experts + n_lanes - 1) / n_lanes * n_lanes;
}

// of a block, in shared memory
struct room {
    int      freed[max_experts]; // slots, by miss
    uint64_t least[n_lanes];     // by warp
};

__device__ inline uint64_t least_of_lanes(uint64_t x) {
    for (int offset = n_lanes / 2; offset > 0; offset /= 2) {
        const uint64_t other = __shfl_xor_sync(0xffffffff, (unsigned long long) x, offset);
        x                    = other < x ? other : x;
    }
    return x;
}

// the least of all threads; each gets it
__device__ inline uint64_t least_of_block(room & s, uint64_t x) {
    const int warp = threadIdx.x / n_lanes, n_warps = blockDim.x / n_lanes;
    x = least_of_lanes(x);
    __syncthreads(); // the last one's readers are done
    if (threadIdx.x % n_lanes == 0) {
        s.least[warp] = x;
    }
    __syncthreads();
    return least_of_lanes((int) threadIdx.x % n_lanes < n_warps ? s.least[threadIdx.x % n_lanes] : no_key);
}

// how many threads before this one say yes, and all
__device__ inline int rank_in_block(int * by_warp, bool yes, int & n_all) {
    const int      warp = threadIdx.x / n_lanes, n_warps = blockDim.x / n_lanes;
    const unsigned lanes = __ballot_sync(0xffffffff, yes);
    if (threadIdx.x % n_lanes == 0) {
        by_warp[warp] = __popc(lanes);
    }
    __syncthreads();
    int rank = __popc(lanes & ((1u << threadIdx.x % n_lanes) - 1));
    n_all    = 0;
    for (int w = 0; w < n_warps; ++w) {
        rank += w < warp ? by_warp[w] : 0;
        n_all += by_warp[w];
    }
    return rank;
}

// Each thread has an expert, `mine`. The first n_wanted of those that are `missing`, by `rank`, get the slots of
// resident ones that are not `needed`, the least worth keeping first, and are listed in `fills`. Returns how many got
// one.
__device__ inline int give_slots(room & s, const layer & of, entry & mine, bool needed, bool missing, int rank,
                                 int n_wanted, uint32_t step, fill * fills) {
    uint64_t key     = !needed && mine.slot >= 0 ? key_of(mine, (int) threadIdx.x, of.victims, step) : no_key;
    int      n_given = 0;
    for (; n_given < n_wanted; ++n_given) {
        const uint64_t least = least_of_block(s, key);
        if (least == no_key) {
            break;
        }
        if (key == least) {
            s.freed[n_given] = mine.slot;
            mine.slot        = -1;
            key              = no_key;
        }
    }
    __syncthreads();
    if (missing && rank < n_given) {
        mine.slot = s.freed[rank];
        of.state->n_given[mine.slot] += 1;
        fills[rank] = { (int) threadIdx.x, mine.slot };
        atomicAdd(&of.state->n_all_given, 1u);
        __threadfence(); // who sees the slot sees that it was given
    }
    return n_given;
}

// Guesses of the step that comes get slots. One block, a thread an expert; `mine`, its entry, is written back.
__device__ inline void give_guesses(room & s, int * by_warp, const layer & of, entry mine, bool needed) {
    table &        state   = *of.state;
    const bool     is      = (int) threadIdx.x < of.n_experts;
    const uint32_t step    = state.step + 1;
    const bool     missing = needed && mine.slot < 0;
    int            n_missing, n_given = 0;
    const int      rank = rank_in_block(by_warp, missing, n_missing);
    if (n_missing > 0) {
        n_given = give_slots(s, of, mine, needed, missing, rank, min(n_missing, max_guesses), step, state.guesses);
    }
    if (missing && rank < n_given) {
        mine.guessed = step;
    }
    if (is) {
        state.entries[threadIdx.x] = mine;
    }
    if (threadIdx.x == 0) {
        state.n_guesses = n_given;
        state.counted.n_guessed += n_given;
        state.is_found = 0;
    }
}

// An expert's bytes in pieces that a block copies, part after part. Word: what their number is a multiple of.
template <typename Word> struct pieces {
    static constexpr int64_t size = (int64_t) n_fill_threads * n_loads; // words
    int64_t                  n[max_parts];
    int64_t                  n_all = 0;

    __device__ explicit pieces(const layer & of) {
#pragma unroll
        for (int p = 0; p < max_parts; ++p) {
            n[p] = p < of.n_parts ? (of.parts[p].stride / (int64_t) sizeof(Word) + size - 1) / size : 0;
            n_all += n[p];
        }
    }

    // piece: 0 to n_all - 1. firsts: by plane, the index that `to` counts from
    __device__ void copy(const layer & of, int64_t piece, int expert, const int32_t * firsts, int to) const {
#pragma unroll
        for (int p = 0; p < max_parts; ++p) {
            if (piece >= 0 && piece < n[p]) {
                copy_of(of.parts[p], piece, expert, firsts, to);
            }
            piece -= n[p];
        }
    }

    // piece: of this part
    static __device__ void copy_of(const part & part, int64_t piece, int expert, const int32_t * firsts, int to) {
        const int64_t index = (int64_t) firsts[part.plane] + to;
        words(part.stride / (int64_t) sizeof(Word), piece, (const Word *) (part.base + expert * part.stride),
              (Word *) (part.base + index * part.stride));
    }

    // Host memory is read past the first cache: nobody reads it again.
    static __device__ void words(int64_t n_words, int64_t piece, const Word * from, Word * to) {
        Word loaded[n_loads];
#pragma unroll
        for (int k = 0; k < n_loads; ++k) {
            const int64_t at = piece * size + k * n_fill_threads + threadIdx.x;
            if (at < n_words) {
                loaded[k] = __ldcv(from + at);
            }
        }
#pragma unroll
        for (int k = 0; k < n_loads; ++k) {
            const int64_t at = piece * size + k * n_fill_threads + threadIdx.x;
            if (at < n_words) {
                to[at] = loaded[k];
            }
        }
    }
};

// What this block copied of a part is there. All of its threads.
__device__ inline void arrive(table & state, int slot, int part) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(&state.n_arrived[slot][part], n_arrivals / gridDim.x);
        atomicAdd(&state.n_all_arrived, n_arrivals / gridDim.x);
    }
}

// The listed experts, into their slots, part after part. Blocks take turns in pieces, and each arrives once a part.
template <typename Word> __device__ void copy_listed(const layer & of, const fill * fills, int n_fills) {
    if (n_fills == 0) {
        return;
    }
    const pieces<Word> all(of);
    int64_t            mine = blockIdx.x; // this block's next piece, from the beginning of a part
    for (int i = 0; i < n_fills; ++i) {
        const fill what = fills[i];
#pragma unroll
        for (int p = 0; p < max_parts; ++p) {
            if (p < of.n_parts) {
                for (; mine < all.n[p]; mine += gridDim.x) {
                    all.copy_of(of.parts[p], mine, what.expert, of.first_slots, what.slot);
                }
                mine -= all.n[p];
                arrive(*of.state, what.slot, p);
            }
        }
    }
}

static_assert(n_arrivals % n_fetch_blocks == 0 && n_arrivals % n_fill_blocks == 0, "blocks arrive alike");

// Guesses of a layer, into slots of it.
template <typename Word> __global__ void fetch(const layer of) {
    copy_listed<Word>(of, of.state->guesses, of.state->n_guesses);
}

// Experts of this layer that were missing, then guesses of the next one.
template <typename Word> __global__ void fill_and_fetch(const layer of, const layer next) {
    copy_listed<Word>(of, of.state->fills, of.state->n_fills);
    copy_listed<Word>(next, next.state->guesses, next.state->n_guesses);
}

inline bool in_words_of(const layer & of, size_t size) {
    for (int p = 0; p < of.n_parts; ++p) {
        if (of.parts[p].stride % size != 0) {
            return false;
        }
    }
    return true;
}

inline void launch_fill_and_fetch(const layer & of, const layer & next, cudaStream_t stream) {
    constexpr size_t size = sizeof(uint4);
    const auto       copy =
        in_words_of(of, size) && in_words_of(next, size) ? fill_and_fetch<uint4> : fill_and_fetch<uint16_t>;
    copy<<<n_fetch_blocks, n_fill_threads, 0, stream>>>(of, next);
}

inline void launch_fetch(const layer & of, cudaStream_t stream) {
    const auto copy = in_words_of(of, sizeof(uint4)) ? fetch<uint4> : fetch<uint16_t>;
    copy<<<n_fetch_blocks, n_fill_threads, 0, stream>>>(of);
}

} // namespace dw::expert_slots
