// See short_head.h.

#include "drafters/short_head.h"

#include "llama/status.h"

#include <cstring>

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
    return size > 0 ? std::unique_ptr<short_head>(new short_head(head, size, share)) : nullptr;
}

short_head::short_head(const ggml_tensor * head, int32_t size, budget_share & share) :
    head_(head),
    vocab_(size, (int32_t) head->ne[1]),
    tensors_(ggml_init({ ggml_tensor_overhead(), nullptr, /*no_alloc*/ true })),
    rows_(ggml_new_tensor_2d(tensors_.get(), head->type, head->ne[0], size)),
    buffer_(ggml_backend_alloc_ctx_tensors_from_buft(tensors_.get(), ggml_backend_cpu_buffer_type())),
    memory_(share, (int64_t) ggml_nbytes(rows_)) {
    if (!buffer_) {
        fail(DW_ERR_MEMORY, "no memory for the output rows of %d tokens, %zu bytes", size, ggml_nbytes(rows_));
    }
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
