// A DFlash drafter's model and context, made for a target: see dflash.h.

#include "drafters/dflash.h"
#include "drafters/dflash_fit.h"
#include "llama/facts.h"

#include <algorithm>
#include <string>

namespace draftwood {

namespace {

// a value of the file's metadata as text; empty: it has none
std::string metadata(const llama_model * model, const char * key) {
    char text[64] = "";
    return llama_model_meta_val_str(model, key, text, sizeof(text)) >= 0 ? text : "";
}

// the same as a number
float number(const llama_model * model, const char * key, float otherwise) {
    const std::string text = metadata(model, key);
    try {
        return text.empty() ? otherwise : std::stof(text);
    } catch (const std::exception &) {
        fail(DW_ERR_UNSUPPORTED, "the drafter's %s is '%s'; expected a number", key, text.c_str());
    }
}

// memory that a model's weights can go to: what is free on these devices, or without any all of the host's
size_t memory_for(const std::vector<ggml_backend_dev_t> & devices) {
    size_t sum = 0, free = 0, total = 0;
    for (ggml_backend_dev_t dev : devices) {
        ggml_backend_dev_memory(dev, &free, &total);
        sum += free;
    }
    if (devices.empty()) {
        ggml_backend_dev_memory(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), &free, &total);
        sum = total;
    }
    return sum;
}

llama_model * load(const char * path, int64_t bytes, const llama_model * target, bool use_extra_bufts) {
    llama_model_params params = llama_model_default_params();
    params.use_extra_bufts    = use_extra_bufts;

    // on its target's devices: it reads the target's embeddings and output head there
    std::vector<ggml_backend_dev_t> devices = devices_of(target);
    const size_t                    memory  = memory_for(devices);
    if (memory > 0 && (uint64_t) bytes > memory) {
        fail(DW_ERR_MEMORY, "the drafter %s takes %lld MiB; %zu MiB of memory are there for it on %s", path,
             (long long) (bytes >> 20), memory >> 20, devices.empty() ? "this machine" : "its target's cards");
    }
    devices.push_back(nullptr); // the end
    params.devices      = devices.data();
    llama_model * model = llama_model_load_from_file(path, params);
    if (!model) {
        fail(DW_ERR_UNSUPPORTED, "the drafter %s cannot be loaded: is it damaged, or larger than the memory?", path);
    }
    return model;
}

llama_context * make_context(llama_context * target, llama_context_params params, llama_model * model) {
    params                   = drafter_context::params_for(target, params);
    params.ctx_type          = LLAMA_CONTEXT_TYPE_DEFAULT;
    params.swa_full          = false; // a cut to before what windows keep makes drafts worse, never the text
    const auto defaults      = llama_context_default_params(); // rope as its file says, whatever stretches the target's
    params.rope_scaling_type = defaults.rope_scaling_type;
    params.rope_freq_base    = defaults.rope_freq_base;
    params.rope_freq_scale   = defaults.rope_freq_scale;
    params.yarn_ext_factor   = defaults.yarn_ext_factor;
    params.yarn_attn_factor  = defaults.yarn_attn_factor;
    params.yarn_beta_fast    = defaults.yarn_beta_fast;
    params.yarn_beta_slow    = defaults.yarn_beta_slow;
    params.yarn_orig_ctx     = defaults.yarn_orig_ctx;
    params.n_outputs_max     = std::max<uint32_t>(DW_MAX_DRAFT + 1, llama_n_seq_max(target)); // llama.cpp asserts it
    // the pin's loader does not read these two from the file
    params.yarn_beta_fast = number(model, "dflash.rope.scaling.yarn_beta_fast", params.yarn_beta_fast);
    params.yarn_beta_slow = number(model, "dflash.rope.scaling.yarn_beta_slow", params.yarn_beta_slow);

    llama_context * ctx = llama_init_from_model(model, params);
    if (!ctx) {
        fail(DW_ERR_MEMORY, "no context for the drafter could be made for n_ctx = %u: is there enough memory?",
             params.n_ctx);
    }
    return ctx;
}

// the target's where the file has none
logits_head head_of(const llama_model * model, const target_context & target) {
    return output_head(output_head(model).weights ? model : llama_get_model(target.get()));
}

} // namespace

dflash_context::dflash_context(target_context & target, const llama_context_params & context_params,
                               const dw_params & params) :
    dflash_context(target, context_params, params,
                   require_dflash_for(target_facts(llama_get_model(target.get())), params.drafter_path)) {}

dflash_context::dflash_context(target_context & target, const llama_context_params & context_params,
                               const dw_params & params, const dflash_file & file) :
    model(load(params.drafter_path, file.bytes, llama_get_model(target.get()),
               /*use_extra_bufts*/ params.exact_rows == 0)),
    ctx(make_context(target.get(), context_params, model.get()), head_of(model.get(), target), head_reads::once, params,
        target.attached().model, rows_have::feeds),
    layers(target_layers(model.get())),
    ahead(drafts_ahead(ctx.attached(), target.attached(), head_of(model.get(), target).weights,
                       { token_embeddings(llama_get_model(target.get())) })),
    block_size(file.block_size),
    mask(llama_vocab_mask(llama_model_get_vocab(model.get()))),
    takes_gaps(uses_mrope(model.get())) {
    llama_set_causal_attn(ctx.get(), metadata(model.get(), "dflash.attention.causal") == "true");
}

} // namespace draftwood
