// How products wait for experts that are copied beside them, on CUDA. Copies run in a queue of their own (beside.h), in
// order, and say of each part when it is there (kernels.cuh), so one row's gate and up begin before down has come. A
// queue beside this one may not run meanwhile: a tool that watches kernels runs them one after another. So whoever has
// waited `most_wait` reads the expert in host memory. Test: tests/ops/test_cuda_slots.py,
// tests/gpu/test_expert_pool_cuda.py.

#pragma once

#include "ops/door/ptx.cuh"
#include "ops/expert-slots/expert-slots.h"

namespace dw::expert_slots {

constexpr uint64_t most_wait = 20'000'000; // nanoseconds; more than 64 experts take on a link of 6 GB/s
constexpr unsigned rest_time = 50;         // nanoseconds between two looks

// What a product needs to wait; state nullptr: it never does.
struct arrivals {
    const table * state;
    int32_t       first_slot; // of the plane whose indices it reads
    uint32_t      parts;      // that it waits for, a bit each
};

__device__ __forceinline__ uint32_t all_parts_of(const layer & of) {
    return (1u << of.n_parts) - 1;
}

// Whether all that went into a slot is there: to be read behind a fence.
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

// The index to read for an expert, when it is there. index: dw_expert_slots' result, complemented.
__device__ __forceinline__ int wait_for(const arrivals & of, int index, int expert) {
    const int slot = ~index - of.first_slot;
    for (const uint64_t begin = ptx::nanoseconds(); !has_arrived(*of.state, slot, of.parts);) {
        if (ptx::nanoseconds() - begin > most_wait) {
            return expert;
        }
        ptx::rest(rest_time);
    }
    __threadfence();
    ptx::let_spans_see();
    return ~index;
}

} // namespace dw::expert_slots
