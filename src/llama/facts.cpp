// See facts.h.

#include "llama/facts.h"

#include "llama-context.h"
#include "llama-ext.h"
#include "llama-model.h"
#include "llama/context_members.h"

#include <algorithm>

namespace draftwood {

const char * architecture(const llama_model * model) {
    return llm_arch_name(model->arch);
}

bool is_qwen35(std::string_view architecture) {
    return architecture == "qwen35" || architecture == "qwen35moe";
}

logits_head output_head(const llama_model * model) {
    return { model->output, model->output_s != nullptr };
}

const ggml_tensor * token_embeddings(const llama_model * model) {
    return model->tok_embd;
}

std::vector<const ggml_tensor *> tensors_of(const llama_model * model) {
    std::vector<const ggml_tensor *> found;
    for (const auto & [name, tensor] : llama_internal_get_tensor_map(model)) {
        found.push_back(tensor);
    }
    return found;
}

std::vector<ggml_backend_dev_t> devices_of(const llama_model * model) {
    const int32_t                   n = model->n_gpu_layers() == 0 ? 0 : llama_model_n_devices(model);
    std::vector<ggml_backend_dev_t> devices(n);
    for (int32_t i = 0; i < n; ++i) {
        devices[i] = llama_model_get_device(model, i);
    }
    return devices;
}

bool experts_are_on_devices(const llama_model * model) {
    const auto devices = devices_of(model);
    const auto tensors = tensors_of(model);
    return std::all_of(tensors.begin(), tensors.end(), [&](const ggml_tensor * t) {
        const bool is_expert = std::string_view(ggml_get_name(t)).find("_exps.") != std::string_view::npos;
        const auto holds     = [&](ggml_backend_dev_t device) {
            return ggml_backend_dev_buffer_type(device) == ggml_backend_buffer_get_type(t->buffer);
        };
        return !is_expert || !t->buffer || std::any_of(devices.begin(), devices.end(), holds);
    });
}

bool has_2d_positions(const llama_model * model) {
    return model->hparams.n_pos_per_embd() >= 3;
}

bool uses_mrope(const llama_model * model) {
    const llama_rope_type type = llama_model_rope_type(model);
    return type == LLAMA_ROPE_TYPE_MROPE || type == LLAMA_ROPE_TYPE_IMROPE;
}

int32_t n_mtp_blocks(const llama_model * model) {
    return llama_model_n_layer_nextn(model);
}

mtp_block mtp_block_of(const llama_model * model) {
    const size_t il = model->hparams.n_layer(); // behind the trunk
    if (il >= model->layers.size()) {
        return {};
    }
    const auto & own = model->layers[il].nextn;
    return { own.eh_proj, own.hnorm,
             own.shared_head_head ? logits_head{ own.shared_head_head, own.shared_head_head_s != nullptr }
                                  : output_head(model),
             own.embed_tokens ? own.embed_tokens : model->tok_embd };
}

delta_net_sizes delta_net_of(const llama_model * model) {
    const llama_hparams & hparams = model->hparams;
    const int64_t         size = hparams.ssm_d_state, n_key_heads = hparams.ssm_n_group;
    return { size, hparams.ssm_dt_rank, n_key_heads, hparams.ssm_d_inner + 2 * n_key_heads * size, hparams.ssm_d_conv };
}

std::vector<int32_t> target_layers(const llama_model * drafter) {
    const int32_t * first = llama_model_target_layer_ids(drafter);
    return { first, first + llama_model_target_layer_ids_n(drafter) };
}

const ggml_tensor * feature_projection(const llama_model * drafter) {
    return drafter->fc;
}

int64_t context_bytes(const llama_context * ctx) {
    int64_t sum = 0;
    for (const auto & [_, each] : llama_get_memory_breakdown(ctx)) {
        sum += (int64_t) (each.context + each.compute);
    }
    return sum;
}

graph_flags graph_flags_of(llama_context * ctx) {
    const llama_cparams & now = ctx->get_cparams();
    return { now.embeddings,          dw_context_graph::has_samplers(*ctx),
             now.embeddings_nextn,    now.embeddings_nextn_masked,
             now.causal_attn,         now.warmup,
             now.embeddings_layer_inp };
}

bool has_flash_attention(const llama_context * ctx) {
    return ctx->get_cparams().flash_attn;
}

int32_t max_outputs(const llama_context * ctx) {
    const llama_cparams & with = ctx->get_cparams();
    return (int32_t) (dw_context_graph::has_samplers(*ctx) ? std::min(with.n_outputs_max, with.n_outputs_max_per_seq)
                                                           : with.n_outputs_max);
}

bool has_unified_kv(const llama_context * ctx) {
    return ctx->get_cparams().kv_unified;
}

bool has_fused_delta_net(const llama_context * ctx) {
    return ctx->get_cparams().fused_gdn_ar && ctx->get_cparams().fused_gdn_ch;
}

} // namespace draftwood
