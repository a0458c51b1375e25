// Models told by their headers: see probe.h.

#include "drafters/probe.h"

#include "drafters/gguf_header.h"
#include "llama/facts.h"

#include <cstdio>

namespace draftwood {

namespace {

// what graph_mtp of qwen35.cpp and qwen35moe.cpp asserts at the pin
bool can_draft_mtp(const gguf_header & header) {
    const std::string arch = header.architecture();
    if (!is_qwen35(arch) || header.u32(arch + ".nextn_predict_layers") != 1) {
        return false;
    }
    const uint32_t n_blocks = header.u32(arch + ".block_count");
    if (header.is_split()) {
        return n_blocks >= 2; // llama.cpp's loader refuses a model whose MTP tensors are in none of the files
    }
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
}

} // namespace draftwood
