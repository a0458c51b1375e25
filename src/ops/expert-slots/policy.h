// Which resident expert is least worth keeping. Integers alone, so CPU and CUDA decide alike.
// Test: tests/ops/test_expert_slots.py.

#pragma once

#include "ops/expert-slots/expert-slots.h"

#if defined(__CUDACC__)
#define DW_BOTH __host__ __device__ inline
#else
#define DW_BOTH inline
#endif

namespace dw::expert_slots {

constexpr uint32_t steps_of_epoch = 64;    // in which a count halves
constexpr uint32_t heat_of_use    = 256;   // of the newest token's experts
constexpr uint32_t heat_of_draft  = 64;    // of an expert that only draft rows chose: most drafts are not kept
constexpr uint32_t heat_of_prompt = 4096;  // of an expert that every row of a prompt chose
constexpr uint32_t most_heat      = 65535; // 16 bits of a key

DW_BOTH uint32_t epoch_of(uint32_t step) {
    return step / steps_of_epoch;
}

DW_BOTH uint32_t heat_at(const entry & of, uint32_t epoch) {
    const uint32_t halvings = epoch - of.epoch;
    return halvings < 32 ? of.heat >> halvings : 0;
}

DW_BOTH void add_heat(entry & to, uint32_t epoch, uint32_t heat) {
    const uint32_t sum = heat_at(to, epoch) + heat;
    to.heat            = sum < most_heat ? sum : most_heat;
    to.epoch           = epoch;
}

// pick: the expert's last place among the step's picks, row by row
DW_BOTH void use(entry & of, uint32_t step, int32_t pick, bool by_first_row) {
    add_heat(of, epoch_of(step), by_first_row ? heat_of_use : heat_of_draft);
    of.recency = (uint64_t) step * max_picks + pick + 1;
}

// The resident expert with the least key goes. Guesses bring in experts that were never used, so the expert's number is
// in its key: no two are equal. 38 bits hold the recency of 134 million steps.
DW_BOTH uint64_t key_of(const entry & of, int32_t expert, policy by, uint32_t step) {
    constexpr uint64_t expert_bits = 10, recency_bits = 38;
    static_assert(max_experts <= 1 << expert_bits, "a number fits");
    const uint64_t recency = of.recency & (((uint64_t) 1 << recency_bits) - 1);
    const uint64_t heat    = by == policy::lru ? 0 : heat_at(of, epoch_of(step));
    return heat << (expert_bits + recency_bits) | recency << expert_bits | (uint64_t) expert;
}

constexpr uint64_t no_key = ~(uint64_t) 0;

// An expert before the first step. rank: 0 for the one most worth keeping.
inline entry initial(int32_t rank, int32_t n_slots, uint32_t heat) {
    const bool resident = rank < n_slots;
    return { resident ? (uint64_t) (n_slots - rank) : 0, heat < most_heat ? heat : most_heat, 0, resident ? rank : -1,
             /*guessed*/ 0 };
}

} // namespace dw::expert_slots
