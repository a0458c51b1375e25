// See placement.h.

#include "server/placement.h"

#include "common.h"
#include "draftwood.h"
#include "log.h"
#include "server/resolve.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <system_error>

namespace draftwood {

namespace {

// as in python/draftwood/load/experts.py: CUDA's own, activations, kept graphs, draft trees, a short head; the
// recurrent state and draft trees of one more slot
constexpr int64_t spare = (int64_t) 3 << 29, of_slot = (int64_t) 1 << 27;

// by its address an override is known as ours
constexpr const char * embeddings = "^token_embd\\.weight$";

bool is_cuda(ggml_backend_dev_t card) {
    return strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(card)), "CUDA") == 0;
}

int64_t bytes_of_file(const std::string & path) {
    std::error_code failed;
    const auto      n_bytes = path.empty() ? 0 : std::filesystem::file_size(path, failed);
    return failed ? 0 : (int64_t) n_bytes;
}

// of a drafter, which may be in several files
int64_t bytes_of_model(const std::string & path) {
    dw_model_info info{};
    info.struct_size = sizeof(info);
    return !path.empty() && dw_probe_model(path.c_str(), &info) == DW_OK ? info.file_bytes : 0;
}

// What a card takes for all, by the headers of files: llama.cpp moves no layers for a model whose tensors are placed.
bool fits(const dw_model_info & info, const common_params & params, ggml_backend_dev_t card) {
    size_t free = 0, total = 0;
    ggml_backend_dev_memory(card, &free, &total);
    const int64_t n_cells = params.n_ctx > 0 ? params.n_ctx : info.n_ctx_train > 0 ? info.n_ctx_train : 1 << 18;
    const auto of_value   = [](ggml_type type) { return ggml_is_quantized(type) ? 2 : (int64_t) ggml_type_size(type); };
    const int64_t        of_cell = std::max(of_value(params.cache_type_k), of_value(params.cache_type_v));
    const dw_pool_spec & pool    = params.dw_pool;
    const int64_t        experts = pool.is_made ? pool.n_taken : info.expert_bytes;
    const int64_t        weights = info.file_bytes - info.expert_bytes + experts +
                            bytes_of_model(params.speculative.dw.drafter_path) + bytes_of_file(params.mmproj.path);
    const int64_t cells  = of_cell * info.kv_values * n_cells;
    const int64_t logits = (int64_t) sizeof(float) * info.n_vocab * params.n_ubatch;
    return (int64_t) free >= weights + cells + logits + of_slot * params.n_parallel + spare;
}

// Returns whether the card gets them.
bool try_to_place_embeddings(common_params & params) {
    auto &     overrides = params.tensor_buft_overrides; // padded with empty ones, which common_fit_params needs
    const bool is_pooled = params.dw_pool.is_made;       // then its own stand there
    if (overrides.size() < 2 || places_tensors(params) || (!is_pooled && params.speculative.dw.type.empty())) {
        return false;
    }
    if (!is_pooled) { // ours may stand there, of the load before a sleep
        overrides[0] = { nullptr, nullptr };
    }
    const std::vector<ggml_backend_dev_t> cards = cards_of(params);
    dw_model_info                         info{};
    info.struct_size = sizeof(info);
    if (cards.size() != 1 || !is_cuda(cards[0]) || dw_probe_model(params.model.path.c_str(), &info) != DW_OK) {
        return false;
    }
    if (!wants_all_layers(params, info) || !fits(info, params, cards[0])) {
        return false;
    }
    const llama_model_tensor_buft_override ours{ embeddings, ggml_backend_dev_buffer_type(cards[0]) };
    if (is_pooled) {
        overrides.insert(overrides.begin(), ours);
    } else {
        overrides[0] = ours;
    }
    LOG_INF("draftwood: token embeddings lie on %s\n", ggml_backend_dev_name(cards[0]));
    return true;
}

} // namespace

std::vector<ggml_backend_dev_t> cards_of(const common_params & params) {
    std::vector<ggml_backend_dev_t> found;
    if (params.n_gpu_layers == 0) {
        return found;
    }
    if (!params.devices.empty()) {
        std::copy_if(params.devices.begin(), params.devices.end(), std::back_inserter(found),
                     [](ggml_backend_dev_t each) { return each != nullptr; });
        return found;
    }
    for (const auto wanted : { GGML_BACKEND_DEVICE_TYPE_GPU, GGML_BACKEND_DEVICE_TYPE_IGPU }) {
        for (size_t i = 0; i < ggml_backend_dev_count() && (found.empty() || wanted == GGML_BACKEND_DEVICE_TYPE_GPU);
             ++i) {
            if (ggml_backend_dev_type(ggml_backend_dev_get(i)) == wanted) {
                found.push_back(ggml_backend_dev_get(i));
            }
        }
    }
    return found;
}

bool wants_all_layers(const common_params & params, const dw_model_info & info) {
    return params.n_gpu_layers < 0 || params.n_gpu_layers > info.n_layers + info.n_layer_nextn;
}

bool places_tensors(const common_params & params) {
    const auto & overrides = params.tensor_buft_overrides;
    return !params.dw_pool.is_made && !overrides.empty() && overrides[0].pattern && overrides[0].pattern != embeddings;
}

void place_embeddings(common_params & params) {
    if (!try_to_place_embeddings(params) && results_of_tests() != DW_RESULTS_TOP) {
        params.speculative.dw.queues_steps = false; // a queued step reads them there
    }
}

} // namespace draftwood
