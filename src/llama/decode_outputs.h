// What the newest decode of a llama_context left, and where each of it lies. Filled by the hooks while the decode runs;
// read through results.h. Must not know: rounds, drafters, samplers.
// Test: tests/model/engine/test_results.py.

#pragma once

#include "llama/decode_request.h"

#include <cstddef>
#include <cstdint>
#include <vector>

class llm_graph_result;

namespace draftwood {

// An output that llama.cpp would have copied to the host at once.
struct kept_output {
    const ggml_tensor * tensor;
    float *             host;  // llama.cpp's buffer for it
    size_t              bytes; // of it
};

// An input that was filled from a device. A replay of the graph fills it again.
struct fed_input {
    row_feed      feed;
    ggml_tensor * input;
};

// What was added to a graph behind its hidden states.
struct graph_tail {
    ggml_tensor * few_logits = nullptr; // f32[n, rows] of few tokens (short_logits.h); nullptr: llama.cpp's, of all
    ggml_tensor * top        = nullptr; // f32[2 dw_n_top + 2, rows], op dw_top_rows; nullptr: not computed
};

struct decode_outputs {
    llm_graph_result *       graph      = nullptr; // the last one; owned by the context or the graph store
    int32_t                  n_ubatches = 0;       // graphs that the decode took
    bool                     is_fed     = true;    // all feeds of the request went into their inputs
    graph_tail               tail;
    std::vector<kept_output> kept;
    std::vector<fed_input>   fed;

    // f32[n_embd, rows] of `graph`, where they were computed
    const ggml_tensor * hidden() const;
    const ggml_tensor * layer_input(int32_t il) const;

    // Copies kept outputs to where llama.cpp has them, and forgets them. The caller has
    // synchronised the context: on CUDA the copies do not wait for its stream.
    void copy_kept();
};

} // namespace draftwood
