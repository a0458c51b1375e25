// dw_expert_slots on CUDA: expert-slots.h. Two launches: one block finds slots, then many copy what is missing. Their
// grids depend on shapes alone; how much there is to copy is read on the device.

#include "common.cuh"
#include "ops/door/launch.h"
#include "ops/expert-slots/beside.h"
#include "ops/expert-slots/expert-slots.h"
#include "ops/expert-slots/policy.h"
#include "ops/expert-slots/stage.h"

namespace slots = dw::expert_slots;

namespace {

constexpr int n_lanes        = 32;
constexpr int n_fill_blocks  = 64; // 16 x 256 threads with 4 loads of 16 bytes each fill a PCIe 5 link
constexpr int n_stage_blocks = 32; // beside another layer's products
constexpr int n_fill_threads = 256;
constexpr int n_loads        = 4; // of a thread, in flight together

struct picks {
    const int32_t * ids;
    int64_t         row; // stride, in ids
    int             n_used, n_rows;

    __device__ int n() const { return n_used * n_rows; }
    __device__ int at(int i) const { return ids[i / n_used * row + i % n_used]; }
};

struct shared_state {
    int      last[slots::max_experts];  // place of the last pick + 1; of a prompt: how many rows chose it
    int      first[slots::max_experts]; // whether row 0 chose it
    int      slot[slots::max_experts];  // -1: on the host alone
    int      freed[slots::max_experts]; // slots, by miss
    uint64_t least[n_lanes];            // by warp
    int      n_misses[n_lanes], n_hits[n_lanes];
};

__device__ uint64_t least_of_lanes(uint64_t x) {
    for (int offset = n_lanes / 2; offset > 0; offset /= 2) {
        const uint64_t other = __shfl_xor_sync(0xffffffff, (unsigned long long) x, offset);
        x                    = other < x ? other : x;
    }
    return x;
}

// the least of all threads; each gets it
__device__ uint64_t least_of_block(shared_state & s, uint64_t x) {
    const int warp = threadIdx.x / n_lanes, n_warps = blockDim.x / n_lanes;
    x = least_of_lanes(x);
    __syncthreads(); // the last one's readers are done
    if (threadIdx.x % n_lanes == 0) {
        s.least[warp] = x;
    }
    __syncthreads();
    return least_of_lanes((int) threadIdx.x % n_lanes < n_warps ? s.least[threadIdx.x % n_lanes] : slots::no_key);
}

__device__ void count_picks(shared_state & s, const picks & from, int n_experts, bool looks) {
    for (int e = threadIdx.x; e < slots::max_experts; e += blockDim.x) {
        s.last[e]  = 0;
        s.first[e] = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < from.n(); i += blockDim.x) {
        const int e = from.at(i);
        if (looks) {
            atomicAdd(&s.last[e], 1);
        } else {
            atomicMax(&s.last[e], i + 1);
        }
        if (i < from.n_used) {
            s.first[e] = 1;
        }
    }
    __syncthreads();
}

// how many threads before this one say yes, and all
__device__ int rank_in_block(int * by_warp, bool yes, int & n_all) {
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

// One block, a thread an expert; with `looks` more threads than experts may count picks.
__global__ void __launch_bounds__(slots::max_experts)
    resolve(const slots::layer of, const picks from, int32_t * dst, bool looks, bool warm_up, bool staged) {
    __shared__ shared_state s;
    slots::table &          state = *of.state;
    const int               e     = threadIdx.x;
    const bool              is    = e < of.n_experts;
    slots::entry            mine  = is ? state.entries[e] : slots::entry{ 0, 0, 0, -1, 0 };
    const uint32_t          step  = state.step + (looks ? 0 : 1);
    count_picks(s, from, of.n_experts, looks);

    const bool needed = is && s.last[e] > 0;
    int        n_misses, n_hits, n_filled = 0;
    const int  rank = rank_in_block(s.n_misses, needed && mine.slot < 0, n_misses);
    rank_in_block(s.n_hits, needed && mine.slot >= 0, n_hits);

    if (!looks && n_misses > 0) {
        uint64_t key = !needed && mine.slot >= 0 ? slots::key_of(mine, of.victims, step) : slots::no_key;
        for (; n_filled < n_misses; ++n_filled) {
            const uint64_t least = least_of_block(s, key);
            if (least == slots::no_key) {
                break;
            }
            if (key == least) {
                s.freed[n_filled] = mine.slot;
                mine.slot         = -1;
                key               = slots::no_key;
            }
        }
        __syncthreads();
        if (needed && mine.slot < 0 && rank < n_filled) {
            mine.slot         = s.freed[rank];
            state.fills[rank] = { e, mine.slot };
        }
    }
    if (needed && looks && !warm_up) {
        const uint64_t share = (uint64_t) slots::heat_of_prompt * s.last[e] / from.n_rows;
        slots::add_heat(mine, slots::epoch_of(step), (uint32_t) share);
    } else if (needed && !looks) {
        slots::use(mine, step, s.last[e] - 1, s.first[e] != 0);
    }
    if (is) {
        state.entries[e] = mine;
        s.slot[e]        = mine.slot;
    }
    if (e == 0) {
        state.step    = step;
        state.n_fills = n_filled;
        state.counted.n_steps++;
        state.counted.n_hits += n_hits;
        state.counted.n_misses += n_filled;
        state.counted.n_in_place += n_misses - n_filled;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < from.n(); i += blockDim.x) {
        const int expert = from.at(i);
        for (int plane = 0; plane < of.n_planes; ++plane) {
            const int absent          = staged ? of.first_staged[plane] + expert : expert;
            dst[plane * from.n() + i] = s.slot[expert] < 0 ? absent : of.first_slots[plane] + s.slot[expert];
        }
    }
}

// An expert's bytes in pieces that a block copies, part after part. Word: what their number is a multiple of.
template <typename Word> struct pieces {
    static constexpr int64_t size = (int64_t) n_fill_threads * n_loads; // words
    int64_t                  n[slots::max_parts];
    int64_t                  n_all = 0;

    __device__ explicit pieces(const slots::layer & of) {
#pragma unroll
        for (int p = 0; p < slots::max_parts; ++p) {
            n[p] = p < of.n_parts ? (of.parts[p].stride / (int64_t) sizeof(Word) + size - 1) / size : 0;
            n_all += n[p];
        }
    }

    // piece: 0 to n_all - 1. firsts: by plane, the index that `to` counts from
    __device__ void copy(const slots::layer & of, int64_t piece, int expert, const int32_t * firsts, int to) const {
#pragma unroll
        for (int p = 0; p < slots::max_parts; ++p) {
            if (piece >= 0 && piece < n[p]) {
                const slots::part & part  = of.parts[p];
                const int64_t       index = (int64_t) firsts[part.plane] + to;
                words(part.stride / (int64_t) sizeof(Word), piece, (const Word *) (part.base + expert * part.stride),
                      (Word *) (part.base + index * part.stride));
            }
            piece -= n[p];
        }
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

template <typename Word> __global__ void fill(const slots::layer of) {
    const slots::table & state   = *of.state;
    const int            n_fills = state.n_fills;
    if (n_fills == 0) {
        return;
    }
    const pieces<Word> all(of);
    for (int64_t i = blockIdx.x; i < n_fills * all.n_all; i += gridDim.x) {
        const slots::fill what = state.fills[i / all.n_all];
        all.copy(of, i % all.n_all, what.expert, of.first_slots, what.slot);
    }
}

// all experts that are not resident, into the layer's place in the stage
template <typename Word> __global__ void stage_absent(const slots::layer of) {
    const slots::table & state = *of.state;
    const pieces<Word>   all(of);
    for (int64_t i = blockIdx.x; i < of.n_experts * all.n_all; i += gridDim.x) {
        const int expert = (int) (i / all.n_all);
        if (state.entries[expert].slot < 0) {
            all.copy(of, i % all.n_all, expert, of.first_staged, expert);
        }
    }
}

bool in_words_of(const slots::layer & of, size_t size) {
    for (int p = 0; p < of.n_parts; ++p) {
        if (of.parts[p].stride % size != 0) {
            return false;
        }
    }
    return true;
}

void copy_absent(const slots::layer & of, cudaStream_t stream) {
    const auto copy = in_words_of(of, sizeof(uint4)) ? stage_absent<uint4> : stage_absent<uint16_t>;
    copy<<<n_stage_blocks, n_fill_threads, 0, stream>>>(of);
}

bool is_captured(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
    return status != cudaStreamCaptureStatusNone;
}

// Copies that were queued ahead are done before what `stream` gets next. Returns whose they were; nullptr: none.
const slots::layer * join(slots::stage & stage, cudaStream_t stream) {
    const slots::layer * coming = stage.coming;
    stage.coming                = nullptr;
    if (coming && is_captured(stream)) {
        CUDA_CHECK(cudaStreamSynchronize(stage.stream)); // queued outside of the graph
    } else if (coming) {
        CUDA_CHECK(cudaStreamWaitEvent(stream, stage.is_ready[coming->place], 0));
    }
    return coming;
}

// The layer's own experts were queued by the layer before it; the first layer of a graph has to copy its own. Then the
// next layer's are queued, if this graph has it with as many rows. Their place is free: the layer that used it has
// computed. A captured graph copies each layer's in turn: what is queued ahead would have to be joined in it.
void copy_ahead(const slots::layer & of, bool has_next, bool is_here, cudaStream_t stream) {
    slots::stage & stage = *of.staged;
    if (!is_here) {
        copy_absent(of, stream);
    }
    if (of.next && has_next && !is_captured(stream)) {
        stage.coming = of.next;
        CUDA_CHECK(cudaEventRecord(stage.is_free, stream));
        CUDA_CHECK(cudaStreamWaitEvent(stage.stream, stage.is_free, 0));
        copy_absent(*of.next, stage.stream);
        CUDA_CHECK(cudaEventRecord(stage.is_ready[of.next->place], stage.stream));
    }
}

// Copies what is missing, beside the nodes that stand before dw_expert_ready.
void copy_missing(const slots::layer & of, bool beside, cudaStream_t stream) {
    const auto copy = in_words_of(of, sizeof(uint4)) ? fill<uint4> : fill<uint16_t>;
    if (!beside) {
        copy<<<n_fill_blocks, n_fill_threads, 0, stream>>>(of);
        return;
    }
    slots::beside & copies = *of.copies;
    CUDA_CHECK(cudaEventRecord(copies.is_chosen, stream));
    CUDA_CHECK(cudaStreamWaitEvent(copies.stream, copies.is_chosen, 0));
    copy<<<n_fill_blocks, n_fill_threads, 0, copies.stream>>>(of);
    CUDA_CHECK(cudaEventRecord(copies.is_filled, copies.stream));
    copies.is_open = true;
}

bool takes(const ggml_tensor * dst) {
    const ggml_tensor * ids = dst->src[slots::ids];
    return dst->type == GGML_TYPE_I32 && ggml_is_contiguous(dst) && ids->type == GGML_TYPE_I32 &&
           ids->nb[0] == sizeof(int32_t);
}

void launch(const dw::launch_context & with, ggml_tensor * dst) {
    const ggml_tensor *  ids     = dst->src[slots::ids];
    const slots::layer & of      = *(const slots::layer *) with.layer;
    const int            n_used  = (int) ids->ne[0];
    const int            n_rows  = (int) ids->ne[1];
    const bool           looks   = slots::only_looks_up(of, n_used, n_rows);
    const bool           warm_up = n_used >= of.n_experts;
    const bool           staged  = of.stages(n_rows) && !warm_up;
    const int            n       = looks ? slots::max_experts : (of.n_experts + n_lanes - 1) / n_lanes * n_lanes;
    const picks          from = { dw::data_of<int32_t>(ids), (int64_t) (ids->nb[1] / sizeof(int32_t)), n_used, n_rows };
    const bool           is_here = of.staged && join(*of.staged, with.stream) == &of;
    if (staged) {
        copy_ahead(of, slots::has_next(dst), is_here, with.stream);
    }
    resolve<<<1, n, 0, with.stream>>>(of, from, dw::data_of<int32_t>(dst), looks, warm_up, staged);
    if (!looks) {
        copy_missing(of, of.copies && slots::copies_beside(dst), with.stream);
    }
}

bool takes_ready(const ggml_tensor * dst) {
    return dst->type == GGML_TYPE_I32;
}

void launch_ready(const dw::launch_context & with, ggml_tensor *) {
    const slots::layer & of = *(const slots::layer *) with.layer;
    if (of.copies && of.copies->is_open) {
        CUDA_CHECK(cudaStreamWaitEvent(with.stream, of.copies->is_filled, 0));
        of.copies->is_open = false;
    }
}

} // namespace

const dw::op_descriptor dw::expert_slots::ready_on_cuda = { dw::expert_slots::ready_signature, nullptr, takes_ready,
                                                            nullptr, launch_ready };

const dw::op_descriptor dw::expert_slots::on_cuda = { dw::expert_slots::signature, nullptr, takes, nullptr, launch };
