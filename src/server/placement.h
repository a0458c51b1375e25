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

// Has token embeddings loaded onto the one CUDA card that has room for the model, or what it holds of it beside a pool
// of experts, and its cells. llama.cpp leaves them in host memory, so that each decode begins with a part on the CPU,
// and a drafted token comes to the host before it is verified. Nothing changes with --override-tensor, --n-cpu-moe, or
// one of several files, nor where there is neither a --spec-type of ours nor a pool. Without them there, no steps are
// queued (dw_params.queue_steps), and the context gets no room for these.
void place_embeddings(common_params & params);

// whether all layers of the model are to lie on cards
bool wants_all_layers(const common_params & params, const dw_model_info & info);

// Whether the user placed tensors. Overrides of place_embeddings() and of a pool do not count.
bool places_tensors(const common_params & params);

} // namespace draftwood
