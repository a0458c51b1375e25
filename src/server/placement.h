// Where a server's weights go: the devices of layers, and token embeddings, as python/draftwood/load/placement.py
// places them. Must not know: slots, rounds. Test: tests/gpu/test_surroundings.py, tests/server/test_placement.py.

#pragma once

#include "draftwood.h"
#include "ggml-backend.h"

#include <vector>

struct common_params;

namespace draftwood {

// Where layers go: the devices of --device, else GPUs, else integrated ones.
std::vector<ggml_backend_dev_t> cards_of(const common_params & params);

// Loads the token embeddings onto the CUDA card if there is exactly one and the model (with a pool: its resident part)
// and the KV cache fit. llama.cpp keeps them in host memory, so each decode starts on the CPU and a drafted token must
// visit the host. No effect with --override-tensor or --n-cpu-moe, or without a --spec-type of ours or a pool. If the
// embeddings stay on the host, no steps are queued (dw_params.queue_steps), and the context gets no spare sequence.
void place_embeddings(common_params & params);

// whether all layers of the model are to lie on cards
bool wants_all_layers(const common_params & params, const dw_model_info & info);

// Whether the user placed tensors. Overrides of place_embeddings() and of a pool do not count.
bool places_tensors(const common_params & params);

} // namespace draftwood
