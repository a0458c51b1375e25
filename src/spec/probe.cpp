// GGUF header check: see probe.h.

#include "probe.h"

#include "gguf.h"
#include "status.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>

namespace draftwood {

namespace {

struct gguf_deleter {
    void operator()(gguf_context * gguf) const { gguf_free(gguf); }
};

using gguf_ptr = std::unique_ptr<gguf_context, gguf_deleter>;

int64_t size_of_gguf(const char * path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
        fail(DW_ERR_FILE, "%s cannot be opened for reading", path);
    }
    char magic[4] = {};
    file.read(magic, sizeof(magic));
    if (file.gcount() != sizeof(magic) || std::memcmp(magic, GGUF_MAGIC, sizeof(magic)) != 0) {
        char shown[32] = "";
        for (int i = 0; i < (int) file.gcount(); ++i) {
            std::snprintf(shown + 3 * i, 4, " %02x", (unsigned char) magic[i]);
        }
        fail(DW_ERR_FILE, "%s is not a GGUF file: it starts with bytes%s, expected 47 47 55 46 (\"GGUF\")", path,
             shown[0] ? shown : " (none)");
    }
    file.seekg(0, std::ios::end);
    return (int64_t) file.tellg();
}

// bytes that the header says the file must have
int64_t announced_size(const gguf_context * gguf) {
    size_t end = gguf_get_data_offset(gguf);
    for (int64_t i = 0; i < gguf_get_n_tensors(gguf); ++i) {
        end =
            std::max(end, gguf_get_data_offset(gguf) + gguf_get_tensor_offset(gguf, i) + gguf_get_tensor_size(gguf, i));
    }
    return (int64_t) end;
}

std::string architecture(const gguf_context * gguf) {
    const int64_t key = gguf_find_key(gguf, "general.architecture");
    return key >= 0 && gguf_get_kv_type(gguf, key) == GGUF_TYPE_STRING ? gguf_get_val_str(gguf, key) : "";
}

uint32_t get_u32(const gguf_context * gguf, const std::string & name) {
    const int64_t key = gguf_find_key(gguf, name.c_str());
    return key >= 0 && gguf_get_kv_type(gguf, key) == GGUF_TYPE_UINT32 ? gguf_get_val_u32(gguf, key) : 0;
}

// one of several files: the others' tensors are not listed here
bool is_split(const gguf_context * gguf) {
    const int64_t key = gguf_find_key(gguf, "split.count");
    return key >= 0 && gguf_get_kv_type(gguf, key) == GGUF_TYPE_UINT16 && gguf_get_val_u16(gguf, key) > 1;
}

// what graph_mtp of qwen35.cpp and qwen35moe.cpp asserts at the pin
bool can_draft_mtp(const gguf_context * gguf, const std::string & arch, uint32_t n_nextn) {
    if ((arch != "qwen35" && arch != "qwen35moe") || n_nextn != 1) {
        return false;
    }
    const uint32_t n_blocks = get_u32(gguf, arch + ".block_count");
    if (is_split(gguf)) {
        return n_blocks >= 2; // llama.cpp's loader refuses a model whose MTP tensors are in none of the files
    }
    if (n_blocks < 2 || gguf_find_tensor(gguf, "blk.0.attn_norm.weight") < 0) {
        return false; // a file with the MTP block alone is no target
    }
    for (const char * part : { "eh_proj", "enorm", "hnorm" }) {
        const std::string name = "blk." + std::to_string(n_blocks - 1) + ".nextn." + part + ".weight";
        if (gguf_find_tensor(gguf, name.c_str()) < 0) {
            return false;
        }
    }
    return true;
}

} // namespace

void probe_model(const char * path, dw_model_info & info) {
    info             = {};
    info.struct_size = sizeof(info);
    info.file_bytes  = size_of_gguf(path);

    const gguf_ptr gguf(gguf_init_from_file(path, { /*no_alloc*/ true, /*ctx*/ nullptr }));
    if (!gguf) {
        fail(DW_ERR_FILE,
             "%s has a damaged or cut-off header (%lld bytes on disk); expected a whole GGUF of version 2 or 3", path,
             (long long) info.file_bytes);
    }
    const int64_t announced = announced_size(gguf.get());
    if (info.file_bytes < announced) {
        fail(DW_ERR_FILE, "%s is cut off: found %lld bytes, its header expects %lld", path, (long long) info.file_bytes,
             (long long) announced);
    }
    const std::string arch = architecture(gguf.get());
    std::snprintf(info.architecture, sizeof(info.architecture), "%s", arch.c_str());
    info.n_tensors     = (int32_t) gguf_get_n_tensors(gguf.get());
    info.n_layer_nextn = (int32_t) get_u32(gguf.get(), arch + ".nextn_predict_layers");
    info.can_draft_mtp = can_draft_mtp(gguf.get(), arch, (uint32_t) info.n_layer_nextn) ? 1 : 0;
}

} // namespace draftwood
