// Experts that lie in a mapped file: those that a step chose are asked for together (ops/expert-readahead). For a model
// that is larger than memory. Made behind its model; graphs that are built from then on have the op. Tensors are parts
// of one layer if their names begin with the same "blk.N.". Must not know: contexts, rounds.
// Test: tests/model/test_expert_readahead.py.

#pragma once

#include "llama.h"
#include "ops/expert-readahead/expert-readahead.h"

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

struct ggml_cgraph;
struct ggml_context;
struct ggml_tensor;

namespace draftwood {

class expert_readahead {
  public:
    // Finds the model's experts in mapped files; there may be none. Must be freed before the model, when its contexts
    // decode no more. Throws failure with DW_ERR_ARGUMENT if the model has one.
    explicit expert_readahead(const llama_model * model);
    ~expert_readahead();
    expert_readahead(const expert_readahead &)             = delete;
    expert_readahead & operator=(const expert_readahead &) = delete;

    struct counters {
        int32_t n_layers;
        int64_t n_steps;        // of one layer
        int64_t n_experts_used; // distinct ones of a layer and step
        int64_t n_experts_read; // of these, with pages that were not in memory
        int64_t bytes_read;     // such pages
        int64_t expert_bytes;   // all experts of all layers
    };
    counters look() const;

  private:
    using layer = dw::expert_readahead::layer;

    // nullptr: it is no part of a layer of experts in a mapped file
    const layer * add(const ggml_tensor * tensor);

    std::map<int32_t, std::unique_ptr<layer>> layers_;  // by number
    std::vector<const ggml_tensor *>          tensors_; // that graphs find their layers by
};

// What a product with these weights should read in place of the experts i32[k, R] that the router chose: a node that
// asks for them, or `ids` if nobody wants that. Throws std::exception; `ids` are right then, too.
ggml_tensor * read_ahead(ggml_context * ctx, ggml_cgraph * graph, const ggml_tensor * weights, ggml_tensor * ids);

} // namespace draftwood
