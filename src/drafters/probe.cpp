// Models told by their headers: see probe.h.

#include "drafters/probe.h"

#include "drafters/gguf_header.h"
#include "llama/facts.h"

#include <cstdio>
#include <set>
#include <string>

namespace draftwood {

namespace {

// what graph_mtp of qwen35.cpp and qwen35moe.cpp asserts at the pin
bool can_draft_mtp(const gguf_header & header) {
    const std::string arch = header.architecture();
    if (!is_qwen35(arch) || header.u32(arch + ".nextn_predict_layers") != 1) {
        return false;
    }
    const uint32_t n_blocks = header.u32(arch + ".block_count");
    if (n_blocks < 2 || !header.has_tensor("blk.0.attn_norm.weight")) {
        return false; // a file with the MTP block alone is no target
    }
    for (const char * part : { "eh_proj", "enorm", "hnorm" }) {
        if (!header.has_tensor("blk." + std::to_string(n_blocks - 1) + ".nextn." + part + ".weight")) {
            return false;
        }
    }
    return true;
}

// the layer of an expert tensor; -1: the name is another tensor's
int32_t layer_of_experts(const std::string & name) {
    const std::string suffix = "_exps.weight";
    int32_t           il     = -1;
    const bool        ends =
        name.size() > suffix.size() && name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0;
    return ends && std::sscanf(name.c_str(), "blk.%d.ffn_", &il) == 1 ? il : -1;
}

// Experts of layers that decode; an MTP block's stay where the model's other weights are.
void count_experts(const gguf_header & header, dw_model_info & info) {
    const std::string arch      = header.architecture();
    const int64_t     n_experts = header.u32(arch + ".expert_count");
    const int64_t     n_layers  = (int64_t) header.u32(arch + ".block_count") - info.n_layer_nextn;
    if (n_experts < 2) {
        return;
    }
    std::set<int32_t> layers;
    for (const auto & [name, n_bytes] : header.tensor_bytes()) {
        const int32_t il = layer_of_experts(name);
        if (il >= 0 && il < n_layers) {
            layers.insert(il);
            info.expert_bytes += n_bytes;
        }
    }
    info.n_experts       = (int32_t) n_experts;
    info.n_experts_used  = (int32_t) header.u32(arch + ".expert_used_count");
    info.n_expert_layers = (int32_t) layers.size();
}

// outputs of keys' and values' projections
int64_t count_kv(const gguf_header & header) {
    const int64_t n_embd = header.u32(header.architecture() + ".embedding_length");
    int64_t       n_all  = 0;
    for (const auto & [name, type] : header.tensors()) {
        int32_t    il   = -1;
        char       part = 0;
        const bool is_it =
            std::sscanf(name.c_str(), "blk.%d.attn_%c.weight", &il, &part) == 2 && (part == 'k' || part == 'v');
        if (is_it && name == "blk." + std::to_string(il) + ".attn_" + part + ".weight" && n_embd > 0) {
            n_all += header.n_values(name) / n_embd;
        }
    }
    return n_all;
}

} // namespace

void probe_model(const char * path, dw_model_info & info) {
    const gguf_header header(path);
    const std::string arch = header.architecture();

    info             = {};
    info.struct_size = sizeof(info);
    info.file_bytes  = header.file_bytes();
    std::snprintf(info.architecture, sizeof(info.architecture), "%s", arch.c_str());
    info.n_tensors     = (int32_t) header.n_tensors();
    info.n_layer_nextn = (int32_t) header.u32(arch + ".nextn_predict_layers");
    info.can_draft_mtp = can_draft_mtp(header) ? 1 : 0;
    count_experts(header, info);
    info.n_layers    = (int32_t) header.u32(arch + ".block_count") - info.n_layer_nextn;
    info.n_vocab     = (int32_t) header.n_texts("tokenizer.ggml.tokens");
    info.n_ctx_train = (int32_t) header.u32(arch + ".context_length");
    info.kv_values   = count_kv(header);
    info.n_files     = (int32_t) header.n_files();
}

} // namespace draftwood
