// How products wait for experts that are copied beside them, on CUDA. Copies run in a queue of their own
// (copy-streams.h), in order, and say of each part when it is there (kernels.cuh), so one row's gate and up begin
// before down has come. A kernel that waits lets the next one start only behind its wait: what starts takes
// multiprocessors from the kernel that copies. A queue beside this one may not run meanwhile, where a tool runs kernels
// one after another. So a wait ends, and the expert is read in host memory.
//
// Products may look into the table themselves, while dw_expert_slots finds slots for what is missing. They wait for it
// only where they miss an expert.
// Test: tests/ops/test_cuda_slots.py, tests/gpu/test_expert_pool_cuda.py.

#pragma once

#include "ops/door/ptx.cuh"
#include "ops/expert-slots/expert-slots.h"

#include <algorithm>
#include <climits>

namespace dw::expert_slots {

constexpr unsigned rest_time = 50;      // nanoseconds between two looks
constexpr int      not_seen  = INT_MIN; // in place of an index: no slot was

// What a product needs to wait; state nullptr: it never does.
struct awaited {
    table *  state;
    int32_t  first_slot; // of the plane whose indices it reads
    uint32_t parts;      // that it waits for, a bit each
    int32_t  n_parts;    // of the layer
    uint64_t most_wait;  // nanoseconds

    // Of a slot that was seen: complemented where its expert may be on its way; not_seen if there is none.
    __device__ __forceinline__ int index(int slot, bool is_there) const {
        const int found = first_slot + slot;
        return slot < 0 ? not_seen : is_there ? found : ~found;
    }

    // is_down: for down, not for gate and up. In front of an expert there are up to two batches of copies.
    static awaited of(const layer & of, const void * down, bool is_down, int32_t plane) {
        constexpr uint64_t least = 20'000'000, bytes_per_nanosecond = 2;
        awaited            found{ of.state, of.first_slots[plane], 0, of.n_parts, 0 };
        for (int p = 0; p < of.n_parts; ++p) {
            found.parts |= (of.parts[p].base == down) == is_down ? 1u << p : 0;
            found.most_wait += 2 * max_guesses * (uint64_t) of.parts[p].stride / bytes_per_nanosecond;
        }
        found.most_wait = std::max(found.most_wait, least);
        return found;
    }
};

// Whether all that went into a slot is there: what is there is read behind see_arrived().
__device__ __forceinline__ bool has_arrived(const table & of, int slot, uint32_t parts) {
    uint32_t arrived[max_parts]; // asked for together
#pragma unroll
    for (int p = 0; p < max_parts; ++p) {
        arrived[p] = *(const volatile uint32_t *) &of.n_arrived[slot][p];
    }
    const uint32_t wanted = *(const volatile uint32_t *) &of.n_given[slot] * n_arrivals;
    bool           has    = true;
#pragma unroll
    for (int p = 0; p < max_parts; ++p) {
        has = has && (!(parts >> p & 1) || arrived[p] == wanted);
    }
    return has;
}

__device__ __forceinline__ void see_arrived() {
    __threadfence();
    ptx::let_spans_see();
}

// When waits that begin now end: once for all waits of a thread.
struct deadline {
    uint64_t at = 0; // nanoseconds; 0: nothing was waited for yet

    __device__ __forceinline__ bool has_passed(uint64_t most_wait) {
        const uint64_t now = ptx::nanoseconds();
        at                 = at == 0 ? now + most_wait : at;
        return now >= at;
    }
};

// Waits, not for ever: counts it as late where it gives up.
template <typename condition>
__device__ __forceinline__ bool wait_until(const awaited & of, deadline & until, condition && is_so) {
    while (!is_so()) {
        if (until.has_passed(of.most_wait)) {
            atomicAdd((unsigned long long *) &of.state->counted.n_late, 1ull);
            return false;
        }
        __nanosleep(rest_time);
    }
    see_arrived();
    return true;
}

// The index to read for an expert, when it is there. index: dw_expert_slots' result, complemented.
__device__ __forceinline__ int wait_for(const awaited & of, int index, int expert, deadline & until) {
    const int slot = ~index - of.first_slot;
    return wait_until(of, until, [&] { return has_arrived(*of.state, slot, of.parts); }) ? ~index : expert;
}

// Whether dw_expert_slots, which runs beside this kernel, has found slots: its result is read behind this.
__device__ __forceinline__ bool is_found(const awaited & of, deadline & until) {
    return wait_until(of, until, [&] { return *(const volatile uint32_t *) &of.state->is_found != 0; });
}

// The slot of an expert; -1: it is on the host alone.
__device__ __forceinline__ int slot_now(const table & of, int expert) {
    return *(const volatile int32_t *) &of.entries[expert].slot;
}

// Whether nothing is on its way into slots that were seen before a fence in front of this. Both sums are read at once:
// of two moments, what had arrived at one might be what was given at the other. What is there is read behind this.
__device__ __forceinline__ bool is_filled(const awaited & of) {
    const uint2 counted = __ldcv((const uint2 *) &of.state->n_all_given);
    if (counted.x * (n_arrivals * (uint32_t) of.n_parts) != counted.y) {
        return false;
    }
    see_arrived();
    return true;
}

// A layer's table as a warp sees it while slots are found beside: lane l has those of experts l + 32 i.
struct seen_slots {
    static constexpr int most = 8; // of a lane; of more than 32 most experts it has none
    int                  slots[most];
    bool                 are_filled; // nothing was on its way into any of these

    __device__ __forceinline__ void see(const awaited & of, int n_experts) {
        if (n_experts <= 32 * most) {
#pragma unroll
            for (int i = 0; i < most; ++i) {
                slots[i] = slot_now(*of.state, min((int) threadIdx.x % 32 + 32 * i, n_experts - 1));
            }
        }
        __threadfence(); // a slot that was seen was given before
        __syncwarp();
        are_filled = n_experts <= 32 * most && is_filled(of);
    }

    // The index of an expert, as awaited::index. A warp.
    __device__ __forceinline__ int index(const awaited & of, int n_experts, int expert) const {
        int slot = slots[0];
#pragma unroll
        for (int i = 1; i < most; ++i) {
            slot = expert / 32 == i ? slots[i] : slot;
        }
        slot = __shfl_sync(0xffffffff, slot, expert % 32);
        if (n_experts > 32 * most) {
            slot = slot_now(*of.state, expert);
            __threadfence();
        }
        return of.index(slot, are_filled);
    }
};

} // namespace dw::expert_slots
