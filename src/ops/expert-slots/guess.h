// Experts that the next layer's router will choose, fetched while this layer computes. A residual stream changes little
// from layer to layer: what the next router makes of this layer's input names 86 % of the experts that it then chooses
// (tiny-moe, bench/LOG.md). Rows are those of a verify; each has its guesses.
//
// The op stands behind dw_expert_slots of this layer and changes the table of the next one. Missing guesses take slots
// as missing experts do, but no use is counted: a wrong one is worth what it was before. Results depend on guesses as
// they do on what is resident: on a CPU never, on CUDA where a product's rounding depends on the slot
// (docs/experts.md).
//
// Test: tests/ops/test_expert_guess.py, tests/model/test_expert_pool.py, tests/gpu/test_expert_pool_cuda.py.

#pragma once

#include "ops/expert-slots/expert-slots.h"

namespace dw::expert_slots {

constexpr int32_t max_guess_rows = 8;

// Guesses, for the layer that the layer pointer names.
//   dst    i32[1], not written
//   hidden f32[n_embd, R]: the residual stream before this layer's norm and router
//   norm   f32[n_embd]: the next layer's weights of that norm. Its scale changes no choice
//   router f32[n_embd, E]: the next layer's
enum guess_src { hidden, norm, router, n_guess_src };
constexpr const char *     guess_operands[n_guess_src] = { "hidden", "norm", "router" };
constexpr op_signature     guess_signature             = { "dw_expert_guess", guess_operands, n_guess_src };
extern const op_descriptor guess_on_cpu, guess_on_cuda;

// experts of a row, behind the flags of dw_expert_slots
constexpr size_t n_used_at = flags_at + n_flags;
static_assert(n_used_at + sizeof(int32_t) <= GGML_MAX_OP_PARAMS, "it fits");

inline int32_t n_used_of(const ggml_tensor * node) {
    int32_t n;
    std::memcpy(&n, (const char *) node->op_params + n_used_at, sizeof(n));
    return n;
}

inline void set_n_used(ggml_tensor * node, int32_t n) {
    std::memcpy((char *) node->op_params + n_used_at, &n, sizeof(n));
}

} // namespace dw::expert_slots
