// What a layer computes while its missing experts are copied: all that needs none of them, the shared expert above all.
// Nodes are moved in front of the op that waits for the copies. Must not know: pools, contexts.
// Test: tests/model/test_expert_pool.py (on a CPU, where nothing runs beside), tests/gpu/test_expert_pool_cuda.py.

#pragma once

#include "ggml-backend.h"

struct ggml_cgraph;
struct ggml_tensor;

namespace draftwood {

// Moves nodes behind `wait` that do not depend on it in front of it, in their order. The graph must not be allocated
// yet. Returns how many of these compute something; none are moved if one has weights that lie on another device.
// Throws std::bad_alloc; the graph is then as it was.
int32_t move_in_front(ggml_cgraph * graph, const ggml_tensor * wait, ggml_backend_dev_t device);

// Whether all from `first` to the end of the graph runs on the device: no weights lie elsewhere, and it has each op.
bool stays_on(const ggml_cgraph * graph, const ggml_tensor * first, ggml_backend_dev_t device);

} // namespace draftwood
