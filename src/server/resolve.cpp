// See resolve.h.

#include "server/resolve.h"

#include "common.h"
#include "draftwood.h"
#include "log.h"
#include "server/placement.h"
#include "speculative.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace draftwood {

namespace {

// as in python/draftwood/options.py
constexpr int32_t default_draft_tokens = 4;
constexpr int32_t cpu_draft_tokens     = 2;
constexpr int32_t tree_draft_tokens    = 8;
constexpr int32_t default_tree_budget  = 16;

bool on_cpu(const common_params & params) {
    if (params.n_gpu_layers == 0) {
        return true;
    }
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        const auto type = ggml_backend_dev_type(ggml_backend_dev_get(i));
        if (type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU) {
            return false;
        }
    }
    return true;
}

// Whether parts of its layers are ops of ours, whatever drafts.
bool is_hybrid(const char * architecture) {
    return std::strcmp(architecture, "qwen35") == 0 || std::strcmp(architecture, "qwen35moe") == 0;
}

bool is_hybrid(const common_params & params) {
    dw_model_info info{};
    info.struct_size = sizeof(info);
    return dw_probe_model(params.model.path.c_str(), &info) == DW_OK && is_hybrid(info.architecture);
}

std::string refusal_of_mtp(const std::string & path) {
    dw_model_info info{};
    info.struct_size = sizeof(info);
    if (dw_probe_model(path.c_str(), &info) != DW_OK) {
        return dw_last_error();
    }
    if (info.can_draft_mtp) {
        return "";
    }
    return string_format("%s has no MTP block that can draft (architecture %s, nextn_predict_layers %d)", path.c_str(),
                         info.architecture, info.n_layer_nextn);
}

std::string refusal_of_dflash(const std::string & drafter, const std::string & path) {
    if (drafter.empty()) {
        return "--spec-type dflash needs a drafter; expected -md DRAFTER.gguf";
    }
    return dw_probe_drafter(drafter.c_str(), path.c_str()) == DW_OK ? "" : dw_last_error();
}

std::string refusal_of(const common_params & params) {
    const dw_spec & dw = params.speculative.dw;
    if (params.embedding) {
        return "contexts for embeddings generate no text";
    }
    if (params.split_mode == LLAMA_SPLIT_MODE_TENSOR && params.n_gpu_layers != 0) {
        return "with --split-mode tensor llama.cpp keeps one graph, and no draft can be verified\n"
               "hint: --split-mode layer";
    }
    if (!dw.drafter_path.empty() && dw.drafter != DW_DRAFTER_DFLASH) {
        return "--spec-type " + dw.type + " takes no drafter; leave out -md, or choose dflash, tree or auto";
    }
    switch (dw.drafter) {
        case DW_DRAFTER_MTP:
            return refusal_of_mtp(params.model.path);
        case DW_DRAFTER_DFLASH:
            return refusal_of_dflash(dw.drafter_path, params.model.path);
        default:
            return "";
    }
}

int32_t drafter_of(const dw_spec & dw) {
    if (dw.type == "plain") {
        return DW_DRAFTER_NONE;
    }
    if (dw.type == "ngram") {
        return DW_DRAFTER_NGRAM;
    }
    const bool either = dw.type == "auto" || dw.type == "tree";
    return dw.type == "dflash" || (either && !dw.drafter_path.empty()) ? DW_DRAFTER_DFLASH : DW_DRAFTER_MTP;
}

int32_t default_tokens(const common_params & params) {
    const dw_spec & dw = params.speculative.dw;
    if (dw.type == "auto" || dw.type == "tree") {
        return tree_draft_tokens;
    }
    return dw.type == "mtp" && on_cpu(params) ? cpu_draft_tokens : default_draft_tokens;
}

// Whether one card gets the whole of a hybrid model, whether or not a pool has its experts.
bool on_one_card(const common_params & params, const dw_model_info & info) {
    const size_t n_cards = cards_of(params).size();
    const bool   is_one  = n_cards == 1 || (n_cards > 1 && params.split_mode == LLAMA_SPLIT_MODE_NONE);
    return is_one && wants_all_layers(params, info) && !places_tensors(params);
}

// n_ubatch 0: as n_batch
int32_t rows_of_a_decode(const common_params & params) {
    return params.n_ubatch > 0 ? std::min(params.n_batch, params.n_ubatch) : params.n_batch;
}

bool is_off(const char * variable) {
    const char * asked = std::getenv(variable);
    return asked && std::strcmp(asked, "0") == 0;
}

// As python/draftwood/load/steps.py. Where slots have cells of their own, a further one would take some from each.
bool queues_steps(const common_params & params) {
    const dw_spec & dw     = params.speculative.dw;
    const bool      shares = params.n_parallel == 1 || params.kv_unified;
    const bool      fits   = rows_of_a_decode(params) > params.n_parallel;
    dw_model_info   info{};
    info.struct_size = sizeof(info);
    if (is_off("DRAFTWOOD_QUEUE_STEPS") || (dw.drafter != DW_DRAFTER_NONE && !dw.chooses) || !shares || !fits ||
        dw_probe_model(params.model.path.c_str(), &info) != DW_OK) {
        return false;
    }
    return is_hybrid(info.architecture) && (on_one_card(params, info) || results_of_tests() == DW_RESULTS_TOP);
}

// From llama.cpp, which would ask for drafts of its own then.
void take_schedule(common_params & params) {
    common_params_speculative & asked = params.speculative;
    dw_spec &                   dw    = asked.dw;
    if (!asked.has_synth()) {
        return;
    }
    if (dw.draft_tokens == 0 || dw.tree_budget > 0) {
        LOG_WRN("draftwood: --spec-synth-rates and --spec-synth-len have no effect with --spec-type %s\n",
                dw.type.c_str());
    } else {
        try {
            dw.rates = common_speculative_synth_rates_resolve(&asked, dw.draft_tokens);
            LOG_WRN("draftwood: drafts are accepted by a schedule; the text is not the model's\n");
        } catch (const std::invalid_argument & error) {
            dw.refusal = error.what();
        }
    }
    asked.synth_len = -1.0;
    asked.synth_rates.clear();
}

// "auto" drafts what a decode has room for. A tree's root is a row, and the token after its last node needs a position.
void fit_drafts(const common_params & params, dw_spec & dw) {
    int32_t n_rows = rows_of_a_decode(params);
    if (params.n_ctx > 0) { // llama.cpp's batches are no longer, though a context is padded
        n_rows = std::min(n_rows, params.n_ctx);
    }
    constexpr int32_t least_rows = 3;
    if (n_rows < least_rows) {
        LOG_WRN("draftwood: found room for %d rows in a decode; drafts need %d: decoding plainly\n", n_rows,
                least_rows);
        dw.drafter     = DW_DRAFTER_NONE;
        dw.tree_budget = 0;
    }
    dw.tree_budget  = std::min(dw.tree_budget, n_rows);
    dw.draft_tokens = dw.drafter == DW_DRAFTER_NONE ? 0 : std::min(dw.draft_tokens, n_rows - 2);
}

// For "auto" without a drafter: a hybrid's layers are fused on a card all the same.
void try_plain(common_params & params) {
    dw_spec & dw = params.speculative.dw;
    if (!dw.drafter_path.empty() || on_cpu(params) || !is_hybrid(params)) {
        return;
    }
    const dw_spec refused = dw;
    dw.type               = "plain";
    dw.drafter            = DW_DRAFTER_NONE;
    dw.refusal            = refusal_of(params);
    if (!dw.refusal.empty()) {
        dw = refused;
        return;
    }
    LOG_INF("draftwood: nothing is drafted: %s\n", refused.refusal.c_str());
}

} // namespace

int32_t results_of_tests() {
    const char * asked = std::getenv("DRAFTWOOD_SERVER_RESULTS");
    return asked && std::strcmp(asked, "top") == 0 ? DW_RESULTS_TOP : DW_RESULTS_AUTO;
}

void resolve(common_params & params) {
    dw_spec & dw = params.speculative.dw;
    if (dw.type.empty() || dw.resolved) {
        return;
    }
    dw.resolved     = true;
    dw.drafter_path = params.speculative.draft.mparams.path;
    dw.drafter      = drafter_of(dw);
    dw.refusal      = refusal_of(params);
    if (!dw.refusal.empty() && dw.type == "auto") {
        try_plain(params);
    }
    if (!dw.refusal.empty() && (dw.type == "auto" || dw.type == "plain")) {
        if (dw.drafter_path.empty()) {
            LOG_INF("draftwood: decoding is llama.cpp's alone: %s\n", dw.refusal.c_str());
        } else { // llama.cpp drafts with it
            LOG_WRN("draftwood: decoding is llama.cpp's alone: %s\n", dw.refusal.c_str());
        }
        dw = {};
        return;
    }
    // else llama-server would load the drafter, too
    params.speculative.draft.mparams = {};
    params.speculative.types         = { COMMON_SPECULATIVE_TYPE_NONE };

    const bool trees = dw.type == "auto" || dw.type == "tree";
    dw.draft_tokens  = std::min(dw.n_max > 0 ? dw.n_max : default_tokens(params), DW_MAX_DRAFT);
    dw.draft_tokens  = dw.drafter == DW_DRAFTER_NONE ? 0 : dw.draft_tokens;
    dw.tree_budget   = trees ? std::min(std::max(default_tree_budget, dw.draft_tokens + 1), DW_MAX_TREE) : 0;
    dw.chooses       = dw.type == "auto";
    if (dw.chooses) {
        fit_drafts(params, dw);
    }
    dw.loads_mtp     = dw.drafter == DW_DRAFTER_MTP;
    dw.queues_steps  = queues_steps(params);
    dw.begins_drafts = !is_off("DRAFTWOOD_BEGIN_DRAFTS");
    take_schedule(params);
    // repacked weights have kernels that depend on the batch, and a draft's rows would not be those of plain steps
    params.no_extra_bufts = true;
    if (params.sampling.backend_sampling) {
        LOG_WRN("draftwood: --backend-sampling has no effect with --spec-type %s\n", dw.type.c_str());
        params.sampling.backend_sampling = false;
    }
}

} // namespace draftwood
