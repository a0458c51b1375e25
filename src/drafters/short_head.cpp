// See short_head.h.

#include "drafters/short_head.h"

#include "llama/backends.h"
#include "llama/tensor_bytes.h"

#include <algorithm>

namespace draftwood {

namespace {

constexpr size_t  most_single_copies = 8;       // of tokens; of more the whole list is copied
constexpr size_t  most_bytes         = 1 << 15; // of a copy that the host does not wait for
constexpr int32_t least_tokens       = 256;     // a smaller part is not worth it: the head is read whole

// tokens that the head is made for; 0: all
int32_t size_for(int32_t n_asked, int32_t part, int32_t n_vocab) {
    const int32_t size = n_asked > 0 ? n_asked : n_vocab / part;
    return size < n_vocab && (n_asked > 0 || size >= least_tokens) ? size : 0;
}

// whether each row lies in one piece where the backend reads it
bool has_plain_rows(const ggml_tensor * head, ggml_backend_t backend) {
    return ggml_is_contiguous(head) &&
           (is_on_host(head) || buffer_type_of(head) == ggml_backend_get_default_buffer_type(backend));
}

} // namespace

std::unique_ptr<short_head> short_head::make(ggml_backend_t backend, const ggml_tensor * head, int32_t n_asked,
                                             int32_t part, budget_share & share) {
    const bool    has_rows = head && head->buffer && has_plain_rows(head, backend);
    const int32_t size     = has_rows ? size_for(n_asked, part, (int32_t) head->ne[1]) : 0;
    if (size == 0) {
        return nullptr;
    }
    std::unique_ptr<short_head> made(new short_head(backend, head, size));
    if (!made->allocate(share)) {
        return nullptr;
    }
    made->fill();
    return made;
}

short_head::short_head(ggml_backend_t backend, const ggml_tensor * head, int32_t size) :
    backend_(backend),
    head_(head),
    vocab_(size, (int32_t) head->ne[1]),
    is_missing_(size, false),
    tensors_(ggml_init({ 2 * ggml_tensor_overhead(), nullptr, /*no_alloc*/ true })),
    rows_(ggml_new_tensor_2d(tensors_.get(), head->type, head->ne[0], size)),
    tokens_(ggml_new_tensor_1d(tensors_.get(), GGML_TYPE_I32, size)) {
    ggml_set_name(rows_, "dw_short_head");
    ggml_set_name(tokens_, "dw_short_tokens");
}

bool short_head::allocate(budget_share & share) {
    if (!share.has_room(bytes()) || !has_spare_memory(backend_, (size_t) bytes())) {
        return false;
    }
    buffer_.reset(ggml_backend_alloc_ctx_tensors(tensors_.get(), backend_));
    if (!buffer_) {
        return false;
    }
    ggml_backend_buffer_set_usage(buffer_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    memory_ = budget_lease(share, bytes());
    return true;
}

void short_head::fill() {
    ggml_backend_tensor_set(tokens_, vocab_.tokens(), 0, ggml_nbytes(tokens_));
    copy_bytes(backend_, rows_, 0, head_, 0, ggml_nbytes(rows_));
}

void short_head::see(const llama_token * tokens, int32_t n) {
    for (int32_t i = 0; i < n; ++i) {
        const int32_t place = vocab_.use(tokens[i]);
        if (place >= 0 && !is_missing_[place]) {
            is_missing_[place] = true;
            missing_.push_back(place);
        }
    }
}

void short_head::settle(row_copies copies) {
    if (missing_.empty()) {
        return;
    }
    std::vector<row_piece> pieces;
    for (const int32_t place : missing_) {
        is_missing_[place] = false;
        const size_t to = place * rows_->nb[1], from = vocab_.token(place) * head_->nb[1];
        if (copies && !is_on_host(head_)) {
            pieces.push_back({ (char *) rows_->data + to, (const char *) head_->data + from, rows_->nb[1] });
        } else {
            copy_bytes(backend_, rows_, to, head_, from, rows_->nb[1]);
        }
    }
    if (!pieces.empty()) {
        copies(backend_, pieces.data(), (int) pieces.size());
    }
    copy_missing_tokens();
    missing_.clear();
}

void short_head::copy_missing_tokens() {
    const auto copy = [&](size_t at, size_t n_bytes) {
        ggml_backend_tensor_set_async(backend_, tokens_, (const char *) vocab_.tokens() + at, at, n_bytes);
    };
    if (missing_.size() <= most_single_copies) {
        for (const int32_t place : missing_) {
            copy(place * sizeof(int32_t), sizeof(int32_t));
        }
        return;
    }
    for (size_t at = 0; at < ggml_nbytes(tokens_); at += most_bytes) {
        copy(at, std::min(most_bytes, ggml_nbytes(tokens_) - at));
    }
}

} // namespace draftwood
