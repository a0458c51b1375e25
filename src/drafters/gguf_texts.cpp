// Texts of a GGUF's header: see gguf_texts.h.

#include "drafters/gguf_texts.h"

#include "drafters/gguf_header.h"
#include "llama/status.h"

#include <bitset>
#include <cstdio>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

namespace draftwood {

namespace {

using texts = std::unordered_set<std::string_view>;

const char * const tokens_key     = "tokenizer.ggml.tokens";
const char * const kind_key       = "tokenizer.ggml.model";
const char * const special_keys[] = {
    "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id",       "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id", "tokenizer.ggml.seperator_token_id",
};

// Tokens that a kind of tokenizer puts before or behind every text; llama-vocab.cpp asserts that it has them.
struct edge_token {
    const char * kind;
    const char * key;
    int64_t      usual; // without a field; -1: none
};

const edge_token edge_tokens[] = {
    { "bert", "tokenizer.ggml.bos_token_id", 101 },
    { "bert", "tokenizer.ggml.seperator_token_id", 102 },
    { "gemma4", "tokenizer.ggml.bos_token_id", -1 },
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
texts require_tokens(const gguf_header & header, const std::vector<std::string> & all, const char * path) {
    texts seen;
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
    return seen;
}

// kind "llama": llama_tokenize throws on a byte that byte_to_token does not find
void require_bytes(const texts & tokens, const char * path) {
    for (int byte = 0; byte < 256; ++byte) {
        char name[8];
        std::snprintf(name, sizeof(name), "<0x%02X>", byte);
        const char itself = (char) byte;
        if (tokens.count(name) == 0 && tokens.count({ &itself, 1 }) == 0) {
            fail(DW_ERR_FILE, "%s: %s is 'llama' and %s lacks %s; expected a token for each byte", path, kind_key,
                 tokens_key, name);
        }
    }
}

// as llama_unescape_rwkv_token reads it
std::string unescaped(const std::string & text) {
    std::string found;
    for (size_t i = 0; i < text.size(); ++i) {
        if (text[i] != '\\') {
            found += text[i];
        } else if (++i < text.size() && text[i] == 'x') {
            const auto digit = [&text](size_t at) { return text[at] >= 'a' ? text[at] - 'a' + 10 : text[at] - '0'; };
            if (i + 2 < text.size()) {
                found += (char) ((digit(i + 1) << 4) + digit(i + 2));
            }
            i += 2;
        } else if (i < text.size()) {
            const char c = text[i];
            found += c == 't' ? '\t' : c == 'n' ? '\n' : c == 'r' ? '\r' : c;
        }
    }
    return found;
}

// kind "rwkv": llama_tokenize never ends at a byte that begins tokens and is none
void require_beginnings(const std::vector<std::string> & all, const char * path) {
    std::bitset<256> begin, whole;
    for (const std::string & text : all) {
        const std::string bytes = text.empty() ? "[EMPTY_" : unescaped(text);
        if (!bytes.empty()) {
            begin.set((unsigned char) bytes[0]);
            if (bytes.size() == 1) {
                whole.set((unsigned char) bytes[0]);
            }
        }
    }
    for (unsigned byte = 0; byte < begin.size(); ++byte) {
        if (begin[byte] && !whole[byte]) {
            fail(DW_ERR_FILE, "%s: %s is 'rwkv' and %s lacks the byte 0x%02x, with which some begin; expected a token",
                 path, kind_key, tokens_key, byte);
        }
    }
}

// what llama-vocab.cpp asserts, or takes for granted, of a model's tokens
void require_tokenizer(const gguf_header & header, const std::vector<std::string> & all, const texts & tokens,
                       const char * path) {
    const std::string kind = header.text(kind_key);
    if (kind == "none" || kind == "no_vocab") {
        fail(DW_ERR_FILE, "%s: %s is '%s'; expected a tokenizer, such as gpt2 or llama", path, kind_key, kind.c_str());
    }
    if (all.empty()) {
        return; // llama.cpp refuses it
    }
    if (kind == "llama") {
        require_bytes(tokens, path);
    }
    if (kind == "rwkv") {
        require_beginnings(all, path);
    }
    for (const edge_token & each : edge_tokens) {
        const bool is_given = header.has_u32(each.key) && header.u32(each.key) < all.size();
        if (kind == each.kind && !is_given && (each.usual < 0 || each.usual >= (int64_t) all.size())) {
            fail(DW_ERR_FILE, "%s: %s is '%s' and %s is %s; expected the number of a token", path, kind_key,
                 kind.c_str(), each.key,
                 header.has_u32(each.key) ? std::to_string(header.u32(each.key)).c_str() : "absent");
        }
    }
}

} // namespace

void require_sound_texts(const gguf_header & header, const char * path) {
    require_utf8(header, path);
    const std::vector<std::string> all    = header.texts(tokens_key);
    const texts                    tokens = require_tokens(header, all, path);
    if (header.has_key(header.architecture() + ".block_count")) {
        require_tokenizer(header, all, tokens, path);
    }
}

} // namespace draftwood
