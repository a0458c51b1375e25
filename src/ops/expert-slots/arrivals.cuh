// How products wait for experts that are copied beside them, on CUDA. Copies run in a queue of their own (beside.h), in
// order, and say of each part when it is there (kernels.cuh), so one row's gate and up begin before down has come. A
// kernel that waits lets the next one start only behind its wait: what starts takes multiprocessors from the kernel
// that copies. A queue beside this one may not run meanwhile, where a tool runs kernels one after another. So a wait
// ends, and the expert is read in host memory. Test: tests/ops/test_cuda_slots.py, tests/gpu/test_expert_pool_cuda.py.

#pragma once

#include "ops/door/ptx.cuh"
#include "ops/expert-slots/expert-slots.h"

#include <algorithm>

namespace dw::expert_slots {

constexpr unsigned rest_time = 50; // nanoseconds between two looks

// What a product needs to wait; state nullptr: it never does.
struct awaited {
    table *  state;
    int32_t  first_slot; // of the plane whose indices it reads
    uint32_t parts;      // that it waits for, a bit each
    uint64_t most_wait;  // nanoseconds

    // is_down: for down, not for gate and up. In front of an expert there are up to two batches of copies.
    static awaited of(const layer & of, const void * down, bool is_down, int32_t plane) {
        constexpr uint64_t least = 20'000'000, bytes_per_nanosecond = 2;
        awaited            found{ of.state, of.first_slots[plane], 0, 0 };
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
    const uint32_t wanted = of.n_given[slot] * n_arrivals;
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

// The index to read for an expert, when it is there. index: dw_expert_slots' result, complemented.
__device__ __forceinline__ int wait_for(const awaited & of, int index, int expert, deadline & until) {
    const int slot = ~index - of.first_slot;
    while (!has_arrived(*of.state, slot, of.parts)) {
        if (until.has_passed(of.most_wait)) {
            atomicAdd((unsigned long long *) &of.state->counted.n_late, 1ull);
            return expert;
        }
        __nanosleep(rest_time);
    }
    see_arrived();
    return ~index;
}

} // namespace dw::expert_slots
