// Experts that the next layer's router will choose, fetched while this layer computes. A residual stream changes little
// from layer to layer: what the next router makes of this layer's input names 86 % of the experts that it then chooses
// (tiny-moe, bench/LOG.md). Rows are those of a verify; each has its guesses.
//
// The op stands behind dw_expert_slots of this layer and changes the table of the next one. Where parts of layers are
// ops of their own (layer-parts.h), dw_choice makes the guesses with its own choice, and dw_expert_slots fetches them:
// copies begin 24 us earlier on an H200, where a layer takes 45.
//
// Missing guesses take slots as missing experts do, but no use is counted: a wrong one is worth what it was before.
// Results depend on guesses as they do on what is resident: on a CPU never, on CUDA where a product's rounding depends
// on the slot (docs/experts.md).
//
// Test: tests/ops/test_expert_guess.py, tests/model/test_expert_pool.py, tests/gpu/test_expert_pool_cuda.py.

#pragma once

#include "ops/expert-slots/expert-slots.h"

namespace dw::expert_slots {

// Guesses, for the layer that the layer pointer names; number_of(node) experts a row.
//   dst    i32[1], not written
//   hidden f32[n_embd, R]: the residual stream before this layer's norm and router
//   norm   f32[n_embd]: the next layer's weights of that norm. Its scale changes no choice
//   router f32[n_embd, E]: the next layer's
enum guess_src { hidden, norm, router, n_guess_src };
constexpr const char *     guess_operands[n_guess_src] = { "hidden", "norm", "router" };
constexpr op_signature     guess_signature             = { "dw_expert_guess", guess_operands, n_guess_src };
extern const op_descriptor guess_on_cpu, guess_on_cuda;

} // namespace dw::expert_slots
