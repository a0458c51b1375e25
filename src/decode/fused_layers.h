// Layers of a decode with few rows, made from ops of layer-parts.h: the graph that llama.cpp built is looked through
// for what these ops compute, and the nodes between are left out. What is not exactly that stays llama.cpp's: a LoRA, a
// control vector, a scale or a bias in between, weights of another type or on another device. For `draftwood doctor`
// python/draftwood/cli/fused.py repeats these rules.
// Must not know: contexts, rounds. Test: tests/model/test_fused_layers.py, tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include <array>
#include <cstdint>
#include <vector>

struct ggml_cgraph;
struct ggml_context;
struct ggml_tensor;

namespace draftwood {

enum fused_part {
    fused_experts,
    fused_feed_forward,
    fused_delta_inputs,
    fused_delta_front,
    fused_delta_heads,
    fused_delta_tree,
    fused_delta_step,
    fused_attention_inputs,
    fused_attention_heads,
    fused_flash_attention,
    fused_delta_output,
    fused_attention_output,
    fused_draft_input,
    fused_feature_keys, // and values, of a drafter's layer
    fused_norm,         // in front of the output head
    fused_product,      // with an output head, or of features
    n_fused_ops,
    fused_gates = n_fused_ops, // of delta-net heads: no op of its own, the delta rule's makes them
    fused_guesses,             // of a pool's next layer, by the op that chooses this one's experts
    fused_attention_gates,     // of attention's heads: attention makes them
    n_fused_parts,
};

// most rows of a graph whose layers are fused; each row then has the same bits whatever the others are
constexpr int32_t max_fused_rows = 16;

// how many of each a graph has
using fused_counts = std::array<int32_t, n_fused_parts>;

// What is read of a graph beside its end: nodes that must stay.
struct graph_results {
    const ggml_tensor *              logits = nullptr;
    std::vector<const ggml_tensor *> kept; // hidden states, inputs of layers
};

// graph: built, without memory, in `ctx`. on_cpu: layers on a CPU, too, where the ops are references and slow: for
// tests. Throws std::bad_alloc; the graph is then as it was.
fused_counts fuse_layers(ggml_context * ctx, ggml_cgraph * graph, const graph_results & results, bool on_cpu);

} // namespace draftwood
