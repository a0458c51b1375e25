// See placement.h.

#include "server/placement.h"

#include "common.h"
#include "draftwood.h"
#include "log.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace draftwood {

namespace {

constexpr size_t spare =
    (size_t) 3 << 30; // bytes of a card for what comes beside weights and cells, as in placement.py

bool is_cuda(ggml_backend_dev_t card) {
    return strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(card)), "CUDA") == 0;
}

bool fit(const dw_model_info & info, const common_params & params, ggml_backend_dev_t card) {
    size_t free = 0, total = 0;
    ggml_backend_dev_memory(card, &free, &total);
    const int64_t n_cells = params.n_ctx > 0 ? params.n_ctx : info.n_ctx_train;
    return free >= (size_t) (info.file_bytes + 2 * info.kv_values * n_cells) + spare; // cells of F16, or smaller ones
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

void place_embeddings(common_params & params) {
    auto & overrides = params.tensor_buft_overrides; // padded with empty ones, which common_fit_params needs
    if (params.dw_pool.n_bytes >= 0 || overrides.size() < 2 || overrides[0].pattern) {
        return;
    }
    const std::vector<ggml_backend_dev_t> cards = cards_of(params);
    dw_model_info                         info{};
    info.struct_size = sizeof(info);
    if (cards.size() != 1 || !is_cuda(cards[0]) || dw_probe_model(params.model.path.c_str(), &info) != DW_OK) {
        return;
    }
    const bool has_all = params.n_gpu_layers < 0 || params.n_gpu_layers > info.n_layers + info.n_layer_nextn;
    if (has_all && fit(info, params, cards[0])) {
        overrides[0] = { "^token_embd\\.weight$", ggml_backend_dev_buffer_type(cards[0]) };
        LOG_INF("draftwood: token embeddings lie on %s\n", ggml_backend_dev_name(cards[0]));
    }
}

} // namespace draftwood
