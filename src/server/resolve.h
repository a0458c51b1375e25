// Which drafter runs for a model, from --spec-type and the headers of the files: the rules of
// python/draftwood/options.py for llama-server's arguments. Must not know: slots, rounds.
// Test: tests/server/test_arguments.py.

#pragma once

#include <cstdint>

struct common_params;

namespace draftwood {

// Fills params.speculative.dw and sets what else of `params` depends on it. Called again it has no effect. Where
// `auto` has nothing to draft with, or a context makes embeddings, the server is left to llama.cpp. Any other type then
// has a refusal.
void resolve(common_params & params);

// dw_params.results of a slot's engine. On a CPU nobody looks for best tokens but for tests.
int32_t results_of_tests();

} // namespace draftwood
