// DFlash block drafting: see dflash.h.

#include "dflash.h"

#include "llama-ext.h"
#include "llama-model.h"
#include "probe.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace draftwood {

namespace {

// a value of the file's metadata as text; empty: it has none
std::string metadata(const llama_model * model, const char * key) {
    char text[64] = "";
    return llama_model_meta_val_str(model, key, text, sizeof(text)) >= 0 ? text : "";
}

llama_model * load(const std::string & path, bool use_extra_bufts) {
    dw_model_info info;
    probe_model(path.c_str(), info);
    if (std::strcmp(info.architecture, "dflash") != 0) {
        fail(DW_ERR_UNSUPPORTED, "the drafter %s has architecture '%s'; expected 'dflash'", path.c_str(),
             info.architecture);
    }
    llama_model_params params = llama_model_default_params();
    params.use_extra_bufts    = use_extra_bufts;
    llama_model * model       = llama_model_load_from_file(path.c_str(), params);
    if (!model) {
        fail(DW_ERR_UNSUPPORTED, "the drafter %s cannot be loaded: is it damaged, or larger than the memory?",
             path.c_str());
    }
    return model;
}

void require_same_vocabulary(const llama_model * drafter, const llama_model * target) {
    const llama_vocab * ours   = llama_model_get_vocab(drafter);
    const llama_vocab * theirs = llama_model_get_vocab(target);
    const int32_t       n      = llama_vocab_n_tokens(theirs);
    if (llama_vocab_n_tokens(ours) != n) {
        fail(DW_ERR_UNSUPPORTED, "the drafter has a vocabulary of %d tokens, the target one of %d",
             llama_vocab_n_tokens(ours), n);
    }
    for (int32_t i = 0; i < n; ++i) {
        const char * a = llama_vocab_get_text(ours, i);
        const char * b = llama_vocab_get_text(theirs, i);
        if (std::strcmp(a, b) != 0) {
            fail(DW_ERR_UNSUPPORTED, "token %d is '%s' to the drafter and '%s' to the target; expected one vocabulary",
                 i, a, b);
        }
    }
}

void require_fit(const llama_model * drafter, const llama_model * target) {
    if (llama_model_dflash_selector_top_k(drafter) > 0 || !metadata(drafter, "dflash.sample_from_anchor").empty()) {
        fail(DW_ERR_UNSUPPORTED, "the drafter is a DFlash2 or DSpark model; expected a plain DFlash one");
    }
    require_same_vocabulary(drafter, target);
    const uint32_t  n_layers = llama_model_target_layer_ids_n(drafter);
    const int32_t * layers   = llama_model_target_layer_ids(drafter);
    for (uint32_t i = 0; i < n_layers; ++i) {
        if (layers[i] < 0 || layers[i] >= llama_model_n_layer(target)) {
            fail(DW_ERR_UNSUPPORTED, "the drafter reads layer %d of its target; this one has %d layers", layers[i],
                 llama_model_n_layer(target));
        }
    }
    const int32_t width  = llama_model_n_embd(target);
    const int32_t n_read = (int32_t) drafter->hparams.n_embd_inp_enc();
    if (n_layers == 0 || n_read != (int32_t) n_layers * width) {
        fail(DW_ERR_UNSUPPORTED, "the drafter reads %d features a token; expected %u layers of the target's width %d",
             n_read, n_layers, width);
    }
    if (!drafter->tok_embd && llama_model_n_embd(drafter) != width) {
        fail(DW_ERR_UNSUPPORTED,
             "the drafter of width %d has no token embeddings of its own and the target's are %d wide",
             llama_model_n_embd(drafter), width);
    }
    const llama_token mask = llama_vocab_mask(llama_model_get_vocab(drafter));
    if (mask < 0 || mask >= llama_vocab_n_tokens(llama_model_get_vocab(target))) {
        fail(DW_ERR_UNSUPPORTED, "the drafter's file names no mask token (tokenizer.ggml.mask_token_id)");
    }
}

llama_context * make_context(llama_context * target, llama_context_params params, llama_model * model) {
    params.ctx_type      = LLAMA_CONTEXT_TYPE_DEFAULT;
    params.ctx_other     = target;
    params.n_ctx         = llama_n_ctx(target);
    params.n_seq_max     = 1;
    params.n_rs_seq      = 0;
    params.n_outputs_max = DW_MAX_DRAFT + 1;
    params.embeddings    = false;
    // the pin's loader keeps its defaults for these two
    const std::string fast = metadata(model, "dflash.rope.scaling.yarn_beta_fast");
    const std::string slow = metadata(model, "dflash.rope.scaling.yarn_beta_slow");
    params.yarn_beta_fast  = fast.empty() ? params.yarn_beta_fast : std::stof(fast);
    params.yarn_beta_slow  = slow.empty() ? params.yarn_beta_slow : std::stof(slow);

    llama_context * ctx = llama_init_from_model(model, params);
    if (!ctx) {
        fail(DW_ERR_INTERNAL, "no context for the drafter could be made for n_ctx = %u: is there enough memory?",
             params.n_ctx);
    }
    return ctx;
}

} // namespace

dflash_drafter::dflash_drafter(llama_context * target, llama_context_params params, const std::string & path,
                               int32_t exact_rows) :
    target_(target),
    model_(load(path, /*use_extra_bufts*/ exact_rows == 0)),
    ctx_((require_fit(model_.get(), llama_get_model(target)), make_context(target, params, model_.get()))),
    graphs_(ctx_.get()),
    batch_(ctx_.get()),
    layers_(llama_model_target_layer_ids(model_.get()),
            llama_model_target_layer_ids(model_.get()) + llama_model_target_layer_ids_n(model_.get())),
    n_embd_(llama_model_n_embd(llama_get_model(target))),
    n_vocab_(llama_vocab_n_tokens(llama_model_get_vocab(model_.get()))),
    mask_(llama_vocab_mask(llama_model_get_vocab(model_.get()))) {
    const std::string block = metadata(model_.get(), "dflash.block_size");
    block_size_             = block.empty() ? 16 : std::stoi(block);
    if (block_size_ < 2) {
        fail(DW_ERR_UNSUPPORTED, "the drafter's block_size is %d; expected at least 2", block_size_);
    }
    for (const int32_t layer : layers_) {
        llama_set_embeddings_layer_inp(target, (uint32_t) layer, true);
    }
    llama_set_causal_attn(ctx_.get(), metadata(model_.get(), "dflash.attention.causal") == "true");
    state_.exact_rows       = exact_rows; // on CPU the faster kernels for a few rows (bench/LOG.md)
    state_.graphs           = &graphs_;
    dw_state_of(ctx_.get()) = &state_;
}

dflash_drafter::~dflash_drafter() {
    dw_state_of(ctx_.get()) = nullptr;
    for (const int32_t layer : layers_) {
        llama_set_embeddings_layer_inp(target_, (uint32_t) layer, false);
    }
}

void dflash_drafter::observe(const llama_token *, int32_t n_tokens, llama_pos pos) {
    trim(pos);
    const size_t width = layers_.size() * (size_t) n_embd_;
    features_.resize(n_tokens * width);
    for (size_t k = 0; k < layers_.size(); ++k) {
        const float * layer = llama_get_embeddings_layer_inp(target_, (uint32_t) layers_[k]); // f32[n_tokens][n_embd]
        if (!layer) {
            fail(DW_ERR_INTERNAL, "the target kept no inputs of its layer %d", layers_[k]);
        }
        for (int32_t i = 0; i < n_tokens; ++i) {
            std::copy_n(layer + (size_t) i * n_embd_, n_embd_, features_.begin() + i * width + k * n_embd_);
        }
    }
    batch_.clear();
    for (int32_t i = 0; i < n_tokens; ++i) {
        batch_.add_features(features_.data() + i * width, (int32_t) width, pos + i);
    }
    const int32_t rc = batch_.decode();
    if (rc != 0) {
        fail(DW_ERR_DECODE, "llama_decode returned %d for the features of %d tokens at position %d", rc, n_tokens, pos);
    }
    n_fed_ = pos + n_tokens; // behind a gap (a loaded state, an image) the block sees less of the text
}

bool dflash_drafter::draft(llama_token last, llama_pos pos, int32_t max_draft, float p_min,
                           std::vector<llama_token> & out) {
    const int32_t n = std::min(max_draft, block_size_ - 1);
    if (pos == 0 || n_fed_ != pos || pos + n >= (llama_pos) llama_n_ctx(ctx_.get())) {
        return false;
    }
    batch_.clear();
    for (int32_t i = 0; i <= n; ++i) {
        batch_.add(i == 0 ? last : mask_, pos + i, /*output*/ true);
    }
    const int32_t rc = batch_.decode();
    if (rc == 0) {
        read(llama_get_logits(ctx_.get()), n, p_min, out);
    }
    llama_memory_seq_rm(llama_get_memory(ctx_.get()), 0, pos, -1); // the block itself is no context
    return rc == 0;
}

// logits f32[n + 1][n_vocab] of the block: the best of rows 1.., while the path's probability is at least p_min
void dflash_drafter::read(const float * logits, int32_t n, float p_min, std::vector<llama_token> & out) const {
    float path = 1.0f;
    for (int32_t i = 1; i <= n; ++i) {
        const float * row  = logits + (size_t) i * n_vocab_;
        const float * best = std::max_element(row, row + n_vocab_);
        if (p_min > 0.0f) {
            float sum = 0.0f;
            for (int32_t v = 0; v < n_vocab_; ++v) {
                sum += std::exp(row[v] - *best);
            }
            path /= sum;
            if (path < p_min) {
                return;
            }
        }
        out.push_back((llama_token) (best - row));
    }
}

void dflash_drafter::trim(llama_pos n_keep) {
    llama_memory_seq_rm(llama_get_memory(ctx_.get()), 0, n_keep, -1);
    n_fed_ = std::min(n_fed_, n_keep);
}

void dflash_drafter::reset() {
    llama_memory_clear(llama_get_memory(ctx_.get()), false);
    n_fed_ = 0;
}

} // namespace draftwood
