// What llama.cpp knows of a loaded model or context and offers in private headers only. Queries: they change nothing.
// The tensors belong to the model. Must not know: memory, rounds, drafters.
// Test: tests/model/engine/test_creation.py, tests/model/test_probe_drafter.py.

#pragma once

#include "ggml-backend.h"
#include "llama.h"

#include <cstdint>
#include <string_view>
#include <tuple>
#include <vector>

namespace draftwood {

// the name that a GGUF gives it, such as "qwen35"
const char * architecture(const llama_model * model);

// qwen35 or qwen35moe: the architectures whose MTP blocks, DFlash drafters and draft trees we know
bool is_qwen35(std::string_view architecture);

// The weight [n_embd, n_vocab] that gives logits.
struct logits_head {
    const ggml_tensor * weights   = nullptr; // nullptr: the model has none
    bool                is_scaled = false;   // its products are multiplied by a number of the file
};
logits_head         output_head(const llama_model * model);
const ggml_tensor * token_embeddings(const llama_model * model); // nullptr: it has none

std::vector<const ggml_tensor *> tensors_of(const llama_model * model);

// devices that the model's layers may be on, besides the CPU
std::vector<ggml_backend_dev_t> devices_of(const llama_model * model);

// no expert lies in host memory, or in a buffer of another kind than a device's own; true without experts
bool experts_are_on_devices(const llama_model * model);

// rows have positions in two dimensions, as images need them
bool has_2d_positions(const llama_model * model);

bool uses_mrope(const llama_model * model); // a token has several positions: time and place

// Tensors of the model's first MTP block.
struct mtp_block {
    const ggml_tensor * projection;  // of a token's embedding and a hidden state; nullptr: the block was not loaded
    const ggml_tensor * hidden_norm; // reads the hidden state first
    logits_head         head;        // its own, or the model's
    const ggml_tensor * embeddings;  // its own, or the model's
};
int32_t   n_mtp_blocks(const llama_model * model);
mtp_block mtp_block_of(const llama_model * model); // n_mtp_blocks() > 0

// Sizes of gated delta net layers: S, H, Hk, C, W of ops/tree-delta-net/tree-ops.h.
struct delta_net_sizes {
    int64_t size, n_heads, n_key_heads, n_channels, conv_width;
};
delta_net_sizes delta_net_of(const llama_model * model);

// Of a DFlash drafter: the target's layers that it reads, and the weight that its features go through first.
std::vector<int32_t> target_layers(const llama_model * drafter);
const ggml_tensor *  feature_projection(const llama_model * drafter);

// bytes that the context's memory and compute buffers take on all devices
int64_t context_bytes(const llama_context * ctx);

// What graphs of a context compute beside logits, and how: it changes without their being planned anew.
struct graph_flags {
    bool              embeddings, samplers; // llama.cpp copies these to the host
    bool              hidden, hidden_of_outputs, is_causal, warms_up;
    std::vector<bool> layer_inputs;

    bool operator==(const graph_flags & other) const {
        const auto all = [](const graph_flags & of) {
            return std::tie(of.embeddings, of.samplers, of.hidden, of.hidden_of_outputs, of.is_causal, of.warms_up,
                            of.layer_inputs);
        };
        return all(*this) == all(other);
    }
};
graph_flags graph_flags_of(llama_context * ctx);

// rows with results that a batch may have (n_outputs_max); with samplers of the context's own, of each sequence
int32_t max_outputs(const llama_context * ctx);

bool has_flash_attention(const llama_context * ctx);
bool has_unified_kv(const llama_context * ctx);      // all sequences share one KV cache
bool has_fused_delta_net(const llama_context * ctx); // for one row and for many

} // namespace draftwood
