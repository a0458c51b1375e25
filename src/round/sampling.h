// A token of one row of the target's last decode, by the request's own sampler chain. Must not know: rounds, drafters.
// Test: tests/model/engine/test_results.py.

#pragma once

#include "tree/token_tree.h"
#include "verify/target_context.h"

namespace draftwood {

// Samples row `row` of the batch; the sampler accepts the token. n_enough: so many best tokens decide as all would, 0:
// all are needed. all_logits (out): the row's logits came to the host. Throws failure if the sampler chooses none.
llama_token sample_row(llama_sampler * sampler, target_context & target, int32_t row, int32_t n_enough,
                       bool & all_logits);

// For benchmarks: the child of `node` on the likeliest path of the tree (accept), or `sampled` or the next token below
// it that no child has.
llama_token scheduled_token(const token_tree & tree, int32_t node, bool accept, llama_token sampled, int32_t n_vocab);

} // namespace draftwood
