// See short_head.h.

#include "drafters/short_head.h"

#include <cstring>
#include <utility>

namespace draftwood {

namespace {

constexpr int32_t part_by_default  = 8;   // of the vocabulary
constexpr int32_t least_by_default = 256; // tokens: a smaller vocabulary's head is read whole

// tokens that the head is made for; 0: all
int32_t size_for(int32_t n_asked, int32_t n_vocab) {
    if (n_asked > 0) {
        return n_asked < n_vocab ? n_asked : 0;
    }
    const int32_t size = n_vocab / part_by_default;
    return size >= least_by_default ? size : 0;
}

} // namespace

std::unique_ptr<short_head> short_head::make(const ggml_tensor * head, int32_t n_asked, budget_share & share) {
    if (!head || !head->buffer || !ggml_backend_buffer_is_host(head->buffer) || !ggml_is_contiguous(head)) {
        return nullptr;
    }
    const int32_t size = size_for(n_asked, (int32_t) head->ne[1]);
    if (size == 0 || !share.has_room(size * (int64_t) head->nb[1])) {
        return nullptr;
    }
    ggml_context_ptr        tensors(ggml_init({ ggml_tensor_overhead(), nullptr, /*no_alloc*/ true }));
    ggml_tensor *           rows = ggml_new_tensor_2d(tensors.get(), head->type, head->ne[0], size);
    ggml_backend_buffer_ptr buffer(
        ggml_backend_alloc_ctx_tensors_from_buft(tensors.get(), ggml_backend_cpu_buffer_type()));
    if (!buffer) {
        return nullptr;
    }
    return std::unique_ptr<short_head>(
        new short_head(head, rows, std::move(tensors), std::move(buffer), budget_lease(share, ggml_nbytes(rows))));
}

short_head::short_head(const ggml_tensor * head, ggml_tensor * rows, ggml_context_ptr tensors,
                       ggml_backend_buffer_ptr buffer, budget_lease memory) :
    head_(head),
    vocab_((int32_t) rows->ne[1], (int32_t) head->ne[1]),
    tensors_(std::move(tensors)),
    rows_(rows),
    buffer_(std::move(buffer)),
    memory_(std::move(memory)) {
    ggml_backend_buffer_set_usage(buffer_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_set_name(rows_, "dw_short_head");
    memcpy(rows_->data, head->data, ggml_nbytes(rows_));
}

void short_head::see(const llama_token * tokens, int32_t n) {
    for (int32_t i = 0; i < n; ++i) {
        if (const int32_t place = vocab_.use(tokens[i]); place >= 0) {
            memcpy((char *) rows_->data + place * rows_->nb[1], (const char *) head_->data + tokens[i] * head_->nb[1],
                   rows_->nb[1]);
        }
    }
}

} // namespace draftwood
