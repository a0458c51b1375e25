// See pool.h.

#include "server/pool.h"

#include "common.h"
#include "log.h"
#include "server/counters.h"
#include "server/heat_file.h"
#include "server/placement.h"

#include <algorithm>
#include <filesystem>
#include <stdexcept>
#include <vector>

namespace draftwood {

namespace {

// as in python/draftwood/load/experts.py
constexpr int64_t staged_layers = 2;
constexpr int64_t least_beside  = 2; // times what prompts' experts take: with less, slots for decoding are worth more

constexpr double gib = 1 << 30;

[[noreturn]] void refuse(const std::string & words) {
    throw std::runtime_error(words);
}

// nullptr: plain memory
ggml_backend_dev_t card_of(const common_params & params) {
    const std::vector<ggml_backend_dev_t> cards = cards_of(params);
    if (cards.empty()) {
        return nullptr;
    }
    if (cards.size() > 1 && params.split_mode != LLAMA_SPLIT_MODE_NONE) {
        refuse(string_format(
            "found %zu cards; a pool of experts lies on one\nhint: --split-mode none with --main-gpu N, or "
            "--device NAME",
            cards.size()));
    }
    const int32_t main = cards.size() > 1 ? params.main_gpu : 0;
    if (main < 0 || main >= (int32_t) cards.size()) {
        refuse(string_format("--main-gpu is %d; expected 0 to %zu", main, cards.size() - 1));
    }
    return cards[main];
}

void require_experts(const dw_model_info & info) {
    if (info.n_experts == 0 || info.expert_bytes == 0) {
        refuse("--expert-vram is given, but this model has no experts; expected a mixture of experts\nhint: leave it "
               "out");
    }
    if (info.n_experts > DW_MAX_EXPERTS) {
        refuse(string_format(
            "a layer of this model has %d experts; a pool holds %d at most\nhint: --n-cpu-moe N keeps experts "
            "of whole layers in host memory",
            info.n_experts, DW_MAX_EXPERTS));
    }
}

// n_taken (out): bytes
dw_expert_params fitting(const dw_model_info & info, int64_t n_bytes, ggml_backend_dev_t card, int64_t & n_taken) {
    const int64_t    staged = staged_layers * info.expert_bytes / info.n_expert_layers;
    dw_expert_params made;
    dw_expert_params_init(&made);
    made.device        = card ? ggml_backend_dev_name(card) : "CPU";
    made.stage         = card && n_bytes >= least_beside * staged ? 1 : 0;
    const int64_t left = n_bytes - (made.stage ? staged : 0);
    made.n_slots       = (int32_t) std::max<int64_t>(info.n_experts_used, left * info.n_experts / info.expert_bytes);
    n_taken            = made.n_slots * info.expert_bytes / info.n_experts + (made.stage ? staged : 0);
    if (n_taken > n_bytes) {
        LOG_WRN(
            "draftwood: experts get %lld bytes and take %lld: each layer has slots for a token's %d experts at least\n",
            (long long) n_bytes, (long long) n_taken, info.n_experts_used);
    }
    return made;
}

// An MTP block's experts stay with the other weights: they are used in every round.
std::string experts_of(const dw_model_info & info) {
    std::string layers;
    for (int32_t il = 0; il < info.n_layers; ++il) {
        layers += (il == 0 ? "" : "|") + std::to_string(il);
    }
    return "^blk\\.(" + layers + ")\\.ffn_(up|down|gate|gate_up)_exps\\.weight$";
}

std::string misfit(const std::string & path, const dw_model_info & info) {
    return string_format("--expert-heat: %s is no heat file of a model with %d layers of %d experts", path.c_str(),
                         info.n_layers, info.n_experts);
}

// Refuses options that do not go together.
bool asks_for_pool(const common_params & params) {
    const dw_pool_spec & asked = params.dw_pool;
    if (asked.n_bytes < 0) {
        if (!asked.heat_file.empty() || asked.guess >= 0) {
            refuse("found --expert-heat or --expert-guess without --expert-vram; expected a size");
        }
        return false;
    }
    if (places_tensors(params)) {
        refuse(
            "found --n-cpu-moe, --cpu-moe, --n-cpu-ffn or --override-tensor beside --expert-vram; expected one way to "
            "place experts\nhint: leave it out: the pool keeps all experts in host memory");
    }
    return true;
}

} // namespace

bool model_pool::make(common_params & params) {
    try {
        make_or_throw(params);
        place_embeddings(params);
        return true;
    } catch (const std::exception & e) {
        LOG_ERR("draftwood: %s\n", e.what());
        return false;
    }
}

void model_pool::make_or_throw(common_params & params) {
    const dw_pool_spec & asked = params.dw_pool;
    pool_.reset();
    if (!asks_for_pool(params)) {
        return;
    }
    info_.struct_size = sizeof(info_);
    if (dw_probe_model(params.model.path.c_str(), &info_) != DW_OK) {
        refuse(dw_last_error());
    }
    require_experts(info_);
    if (asked.n_bytes >= info_.expert_bytes) {
        LOG_INF("draftwood: all experts fit into --expert-vram: there is no pool\n");
        return;
    }
    ggml_backend_dev_t card   = card_of(params);
    dw_expert_params   wanted = fitting(info_, asked.n_bytes, card, params.dw_pool.n_taken);
    wanted.guess              = asked.guess < 0 ? card != nullptr : asked.guess;
    dw_expert_pool * made     = nullptr;
    if (dw_expert_pool_new(&wanted, &made) != DW_OK) {
        refuse(dw_last_error());
    }
    pool_.reset(made);
    heat_file_              = asked.heat_file;
    const std::string fault = warm();
    if (!fault.empty() && !asked.is_made) {
        refuse(fault);
    } else if (!fault.empty()) { // llama-server ends by an abort if it cannot wake up
        LOG_WRN("draftwood: %s\n", fault.c_str());
    }
    place(params);
    LOG_INF("draftwood: %d of %d experts of each layer in slots on %s, all of them in host memory\n", wanted.n_slots,
            info_.n_experts, wanted.device);
    if (!card) {
        LOG_WRN("draftwood: slots of experts lie in plain memory, where they save nothing: %s\n",
                params.n_gpu_layers == 0 ? "--n-gpu-layers is 0" : "found no card");
    }
}

void model_pool::place(common_params & params) {
    pattern_                     = experts_of(info_);
    params.dw_pool.is_made       = true;
    params.fit_params            = false; // it knows no pool
    params.tensor_buft_overrides = {
        { pattern_.c_str(), (ggml_backend_buffer_type_t) dw_expert_pool_buffer_type(pool_.get()) },
        { nullptr, nullptr },
    };
}

std::string model_pool::warm() const {
    if (heat_file_.empty()) {
        return "";
    }
    if (const std::string found = refusal_of_heat_file(heat_file_); !found.empty()) {
        return "--expert-heat " + heat_file_ + " " + found + "; expected a file in a folder that can be written";
    }
    if (!std::filesystem::exists(heat_file_)) {
        return "";
    }
    const std::optional<expert_heat> heat = read_heat(heat_file_, info_.n_layers, info_.n_experts);
    if (!heat) {
        return misfit(heat_file_, info_) + "\nhint: another name, or leave it out; a server writes one when it ends";
    }
    for (const auto & [il, values] : *heat) {
        dw_expert_set_heat(pool_.get(), il, values.data(), (int32_t) values.size());
    }
    return "";
}

void model_pool::loaded(const llama_model * model) const {
    int64_t n_bytes = 0;
    bool    on_host = false;
    if (model || !pool_ || dw_expert_refused(pool_.get(), &n_bytes, &on_host) != DW_OK || n_bytes == 0) {
        return;
    }
    if (on_host) {
        LOG_ERR(
            "draftwood: the system refused %lld bytes of pinned host memory for experts, which take %.1f GiB in all\n"
            "hint: a larger limit of locked memory (ulimit -l, a container's), or --n-cpu-moe N in place of "
            "--expert-vram; --fit on leaves experts to llama-server\n",
            (long long) n_bytes, info_.expert_bytes / gib);
    } else {
        LOG_ERR("draftwood: the card refused %lld bytes for slots of experts\nhint: a smaller --expert-vram, or --fit "
                "on, which leaves experts to llama-server\n",
                (long long) n_bytes);
    }
}

void model_pool::keep_heat() const {
    if (!pool_ || heat_file_.empty()) {
        return;
    }
    expert_heat heat;
    bool        is_some = false;
    for (int32_t il = 0; il < info_.n_layers; ++il) {
        dw_expert_layer layer{};
        layer.struct_size = sizeof(layer);
        if (dw_expert_get_layer(pool_.get(), il, &layer) != DW_OK) {
            continue; // no experts, or no graph was made with it
        }
        heat[il] = { layer.heat, layer.heat + layer.n_experts };
        is_some  = is_some || std::any_of(heat[il].begin(), heat[il].end(), [](uint32_t each) { return each > 0; });
    }
    if (!is_some) {
        return;
    }
    if (std::filesystem::exists(heat_file_) && !read_heat(heat_file_, info_.n_layers, info_.n_experts)) {
        LOG_WRN("draftwood: %s; it stays as it is\n", misfit(heat_file_, info_).c_str());
    } else if (!write_heat(heat_file_, heat, info_.n_experts)) {
        LOG_WRN("draftwood: %s could not be written; what was learnt of experts is lost\n", heat_file_.c_str());
    }
}

std::string model_pool::metrics() const {
    dw_expert_stats stats{};
    stats.struct_size = sizeof(stats);
    if (!pool_ || dw_expert_get_stats(pool_.get(), &stats) != DW_OK) {
        return "";
    }
    return counter("expert_hits_total", "Experts that were in a slot", stats.n_hits) +
           counter("expert_misses_total", "Experts that were copied into a slot", stats.n_misses) +
           counter("expert_in_place_total", "Experts that were read from host memory, or copied for a prompt",
                   stats.n_in_place) +
           counter("expert_copied_bytes_total", "Bytes that were copied for them and for guesses", stats.bytes_missed);
}

} // namespace draftwood
