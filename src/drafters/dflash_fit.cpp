// DFlash drafters told by their headers: see dflash_fit.h.

#include "drafters/dflash_fit.h"

#include "drafters/gguf_header.h"
#include "llama/facts.h"
#include "llama/status.h"

namespace draftwood {

namespace {

constexpr int32_t usual_block = 16;   // of a file that does not say
constexpr int32_t max_block   = 4096; // far beyond DW_MAX_DRAFT: a damaged file

const char * const tokens_key = "tokenizer.ggml.tokens";
const char * const mask_key   = "tokenizer.ggml.mask_token_id";

// a vocabulary's texts; llama-vocab.cpp names tokens without one
std::vector<std::string> tokens_of(const gguf_header & header) {
    std::vector<std::string> tokens = header.texts(tokens_key);
    for (size_t i = 0; i < tokens.size(); ++i) {
        if (tokens[i].empty()) {
            tokens[i] = "[EMPTY_" + std::to_string(i) + "]";
        }
    }
    return tokens;
}

// related drafters of other layouts are refused: DFlash2, DSpark, drafters of a part of the vocabulary
void require_plain(const gguf_header & header, const char * path) {
    const std::string arch = header.architecture();
    if (arch != "dflash") {
        fail(DW_ERR_UNSUPPORTED, "the drafter %s has architecture '%s'; expected 'dflash'", path, arch.c_str());
    }
    for (const char * key :
         { "hyper_connection.count", "selector_rank", "selector_top_k", "conv_kernel_size", "sample_from_anchor" }) {
        if (header.has_key("dflash." + std::string(key))) {
            fail(DW_ERR_UNSUPPORTED, "the drafter %s has dflash.%s, as DFlash2 and DSpark do; expected a plain DFlash",
                 path, key);
        }
    }
    for (const char * tensor : { "markov_w1.weight", "selector_hidden.weight", "d2t" }) {
        if (header.has_tensor(tensor)) {
            fail(DW_ERR_UNSUPPORTED,
                 "the drafter %s has a tensor %s; expected a plain DFlash over the whole vocabulary", path, tensor);
        }
    }
}

void require_vocabulary(const gguf_header & header, const std::vector<std::string> & theirs) {
    const std::vector<std::string> ours = tokens_of(header);
    if (ours.size() != theirs.size()) {
        fail(DW_ERR_UNSUPPORTED, "the drafter has a vocabulary of %zu tokens, the target one of %zu", ours.size(),
             theirs.size());
    }
    for (size_t i = 0; i < ours.size(); ++i) {
        if (ours[i] != theirs[i]) {
            fail(DW_ERR_UNSUPPORTED, "token %zu is '%s' to the drafter and '%s' to the target; expected one vocabulary",
                 i, ours[i].c_str(), theirs[i].c_str());
        }
    }
    if (!header.has_u32(mask_key)) {
        fail(DW_ERR_UNSUPPORTED, "the drafter's file names no mask token (%s); expected one", mask_key);
    }
    if (header.u32(mask_key) >= theirs.size()) {
        fail(DW_ERR_UNSUPPORTED, "the drafter's %s is %u; expected 0 to %zu, a token", mask_key, header.u32(mask_key),
             theirs.size() - 1);
    }
}

void require_layers(const gguf_header & header, const target_facts & target) {
    const std::vector<int32_t> layers = header.numbers("dflash.target_layers");
    for (const int32_t layer : layers) {
        if (layer < 0 || layer >= target.n_layers) {
            fail(DW_ERR_UNSUPPORTED, "the drafter reads layer %d of its target; this one has %d layers", layer,
                 target.n_layers);
        }
    }
    const size_t n_read = layers.size() * header.u32("dflash.embedding_length");
    if (n_read == 0 || n_read != layers.size() * (size_t) target.width) {
        fail(DW_ERR_UNSUPPORTED, "the drafter reads %zu features a token; expected %zu layers of the target's width %d",
             n_read, layers.size(), target.width);
    }
}

} // namespace

target_facts::target_facts(const llama_model * model) :
    architecture(draftwood::architecture(model)),
    n_layers(llama_model_n_layer(model)),
    width(llama_model_n_embd(model)) {
    const llama_vocab * vocab = llama_model_get_vocab(model);
    for (int32_t i = 0; i < llama_vocab_n_tokens(vocab); ++i) {
        tokens.emplace_back(llama_vocab_get_text(vocab, i));
    }
}

target_facts::target_facts(const char * path) {
    const gguf_header header(path);
    architecture = header.architecture();
    n_layers =
        (int32_t) (header.u32(architecture + ".block_count") - header.u32(architecture + ".nextn_predict_layers"));
    width  = (int32_t) header.u32(architecture + ".embedding_length");
    tokens = tokens_of(header);
}

dflash_file require_dflash_for(const target_facts & target, const char * path) {
    const gguf_header header(path);
    require_plain(header, path);
    if (!is_qwen35(target.architecture)) {
        fail(DW_ERR_UNSUPPORTED, "DFlash drafts for qwen35 and qwen35moe; found target architecture '%s'",
             target.architecture.c_str());
    }
    require_vocabulary(header, target.tokens);
    require_layers(header, target);

    const char * const key   = "dflash.block_size";
    const uint32_t     block = header.has_key(key) ? header.u32(key) : usual_block;
    if (block < 2 || block > max_block) {
        fail(DW_ERR_UNSUPPORTED, "the drafter's dflash.block_size is %u; expected 2 to %d", block, max_block);
    }
    return { header.file_bytes(), (int32_t) block };
}

} // namespace draftwood
