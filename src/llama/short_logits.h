// Computes a graph's logits for few tokens: by a head that has their rows alone. Must not know: drafters.
// Test: tests/model/engine/test_short_head.py.

#pragma once

struct ggml_tensor;
struct llm_graph_context;

namespace draftwood {

struct head_rows {
    const ggml_tensor * whole      = nullptr; // [n_embd, n_vocab]
    ggml_tensor *       few        = nullptr; // [n_embd, n]; nullptr: the whole head is used
    ggml_tensor *       few_tokens = nullptr; // i32[n]
};

// Lets the product with the whole head read the few rows instead, in a new graph that nobody has allocated. Returns its
// result f32[n, n_outputs], which llama.cpp then does not know as logits. nullptr: the logits are no such product, or
// the graph goes on from them. It stays as it is.
ggml_tensor * shorten_logits(llm_graph_context & graph, const head_rows & head);

} // namespace draftwood
