// Where a graph's next layer says what it will need: behind a layer's choice of experts stands the op that guesses the
// next one's (ops/expert-slots/guess.h). Must not know: pools, contexts. Test: tests/model/test_expert_pool.py.

#pragma once

#include "ggml-backend.h"
#include "ops/expert-slots/expert-slots.h"

struct ggml_cgraph;
struct ggml_context;
struct ggml_tensor;

namespace draftwood {

// Puts the op behind `choice`, a layer's dw_expert_slots in this graph. next: the layer behind it, whose router chose
// `ids`; its nodes up to these are the newest of the graph, which must not be allocated yet. false if a router is not a
// plain product of an RMS-normed input, if there are too many rows, or if the device does not have the op. Throws
// std::bad_alloc.
bool add_guess(ggml_context * ctx, ggml_cgraph * graph, const ggml_tensor * choice, const ggml_tensor * ids,
               const dw::expert_slots::layer & next, ggml_backend_dev_t device);

} // namespace draftwood
