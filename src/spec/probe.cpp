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

// the header of a file that is as long as it says
gguf_ptr read_header(const char * path, int64_t & file_bytes) {
    file_bytes = size_of_gguf(path);
    gguf_ptr gguf(gguf_init_from_file(path, { /*no_alloc*/ true, /*ctx*/ nullptr }));
    if (!gguf) {
        fail(DW_ERR_FILE,
             "%s has a damaged or cut-off header (%lld bytes on disk); expected a whole GGUF of version 2 or 3", path,
             (long long) file_bytes);
    }
    const int64_t announced = announced_size(gguf.get());
    if (file_bytes < announced) {
        fail(DW_ERR_FILE, "%s is cut off: found %lld bytes, its header expects %lld", path, (long long) file_bytes,
             (long long) announced);
    }
    return gguf;
}

} // namespace

void probe_model(const char * path, dw_model_info & info) {
    info                   = {};
    info.struct_size       = sizeof(info);
    const gguf_ptr    gguf = read_header(path, info.file_bytes);
    const std::string arch = architecture(gguf.get());
    std::snprintf(info.architecture, sizeof(info.architecture), "%s", arch.c_str());
    info.n_tensors     = (int32_t) gguf_get_n_tensors(gguf.get());
    info.n_layer_nextn = (int32_t) get_u32(gguf.get(), arch + ".nextn_predict_layers");
    info.can_draft_mtp = can_draft_mtp(gguf.get(), arch, (uint32_t) info.n_layer_nextn) ? 1 : 0;
}

int64_t require_plain_dflash(const char * path) {
    int64_t           file_bytes = 0;
    const gguf_ptr    gguf       = read_header(path, file_bytes);
    const std::string arch       = architecture(gguf.get());
    if (arch != "dflash") {
        fail(DW_ERR_UNSUPPORTED, "the drafter %s has architecture '%s'; expected 'dflash'", path, arch.c_str());
    }
    for (const char * key :
         { "hyper_connection.count", "selector_rank", "selector_top_k", "conv_kernel_size", "sample_from_anchor" }) {
        if (gguf_find_key(gguf.get(), ("dflash." + std::string(key)).c_str()) >= 0) {
            fail(DW_ERR_UNSUPPORTED, "the drafter %s has dflash.%s, as DFlash2 and DSpark do; expected a plain DFlash",
                 path, key);
        }
    }
    for (const char * tensor : { "markov_w1.weight", "selector_hidden.weight", "d2t" }) {
        if (gguf_find_tensor(gguf.get(), tensor) >= 0) {
            fail(DW_ERR_UNSUPPORTED,
                 "the drafter %s has a tensor %s; expected a plain DFlash over the whole vocabulary", path, tensor);
        }
    }
    const uint32_t key_length   = get_u32(gguf.get(), "dflash.attention.key_length");
    const uint32_t value_length = get_u32(gguf.get(), "dflash.attention.value_length");
    if (key_length != value_length) {
        fail(DW_ERR_UNSUPPORTED, "the drafter %s has keys of %u and values of %u (0: not given); expected one size",
             path, key_length, value_length);
    }
    const uint32_t n_rot = get_u32(gguf.get(), "dflash.rope.dimension_count");
    if (n_rot % 2 != 0 || (key_length != 0 && n_rot > key_length)) {
        fail(DW_ERR_UNSUPPORTED, "the drafter %s rotates %u values of a head of %u; expected an even number of them",
             path, n_rot, key_length);
    }
    return file_bytes;
}

} // namespace draftwood
