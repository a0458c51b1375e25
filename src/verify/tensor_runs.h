// Tensors of many layers as one: if they are alike and lie at equal distances, one node can work on all of them.
// llama.cpp puts the states of all layers of a device into one buffer, in turn, and so keys and values.
// Must not know: what tensors hold. Test: tests/model/engine/test_tensor_runs.py.

#pragma once

#include "ggml.h"

#include <cstdint>
#include <vector>

namespace draftwood {

// tensors [first, first + n) of a list, `stride` bytes from one to the next
struct tensor_run {
    size_t  first;
    int64_t n;
    size_t  stride;
};

// The list in runs, each as long as it can be.
std::vector<tensor_run> runs_of(const std::vector<ggml_tensor *> & tensors);

// One tensor over all of a run. Its dimension `dim` counts the tensors, which have as many dimensions each. They must
// outlive it.
ggml_tensor * as_one(ggml_context * ctx, const std::vector<ggml_tensor *> & tensors, const tensor_run & run, int dim);

} // namespace draftwood
