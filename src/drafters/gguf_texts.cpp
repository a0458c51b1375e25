// Texts of a GGUF's header: see gguf_texts.h.

#include "drafters/gguf_texts.h"

#include "drafters/gguf_header.h"
#include "llama/status.h"

#include <string_view>
#include <unordered_set>

namespace draftwood {

namespace {

const char * const tokens_key     = "tokenizer.ggml.tokens";
const char * const special_keys[] = {
    "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id",       "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id", "tokenizer.ggml.seperator_token_id",
};

bool is_utf8(std::string_view text) {
    size_t n_left = 0;
    for (size_t i = 0; i < text.size(); ++i) {
        const auto byte = (unsigned char) text[i];
        if (n_left > 0) {
            if ((byte & 0xc0) != 0x80) {
                return false;
            }
            --n_left;
            continue;
        }
        if (byte < 0x80) {
            continue;
        }
        n_left                   = byte >= 0xf0 ? 3 : byte >= 0xe0 ? 2 : 1;
        const unsigned char next = i + 1 < text.size() ? (unsigned char) text[i + 1] : 0;
        const bool bad = byte < 0xc2 || byte > 0xf4 || (byte == 0xe0 && next < 0xa0) || (byte == 0xed && next > 0x9f) ||
                         (byte == 0xf0 && next < 0x90) || (byte == 0xf4 && next > 0x8f);
        if (bad) {
            return false;
        }
    }
    return n_left == 0;
}

// texts that Python reads
void require_utf8(const gguf_header & header, const char * path) {
    for (const auto & [key, value] : header.scalar_texts()) {
        if (!is_utf8(key) || !is_utf8(value)) {
            fail(DW_ERR_FILE, "%s has bytes that are no UTF-8 in %s; expected text", path,
                 is_utf8(key) ? key.c_str() : "the name of a field");
        }
    }
}

// llama.cpp finds tokens by their texts
void require_tokens(const gguf_header & header, const char * path) {
    const std::vector<std::string>       all = header.texts(tokens_key);
    std::unordered_set<std::string_view> seen;
    seen.reserve(all.size());
    for (size_t i = 0; i < all.size(); ++i) {
        if (!all[i].empty() && !seen.insert(all[i]).second) {
            fail(DW_ERR_FILE, "%s: token %zu of %s is '%s', as one before; expected texts that differ", path, i,
                 tokens_key, is_utf8(all[i]) ? all[i].c_str() : "?");
        }
    }
    for (const char * key : special_keys) {
        const uint32_t id = header.u32(key);
        if (header.has_u32(key) && id < all.size() && !is_utf8(all[id])) {
            fail(DW_ERR_FILE, "%s: token %u, its %s, has bytes that are no UTF-8; expected text", path, id, key);
        }
    }
}

} // namespace

void require_sound_texts(const gguf_header & header, const char * path) {
    require_utf8(header, path);
    require_tokens(header, path);
}

} // namespace draftwood
