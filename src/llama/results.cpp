// See results.h.

#include "llama/results.h"

#include "llama-ext.h"
#include "llama/backends.h"
#include "llama/tensor_bytes.h"
#include "ops/door/registry.h"
#include "ops/top-rows/top-rows.h"

#include <algorithm>
#include <utility>

namespace draftwood {

namespace {

// A graph of a GPU serves so many tokens before it is built anew, which takes as long as three steps. Attention of a
// few rows passes over cells that no row sees, at the price of blocks of threads for each part of them.
constexpr uint32_t few_rows_step = 2048, kv_step = 1024;

static_assert(dw_n_top <= dw::top_rows::max_k);

// op dw_top_rows for a device; nullptr: it has none
const dw_custom_op * find_top_rows(ggml_backend_dev_t dev) {
    if (!has_op(dev, dw::top_rows::signature)) {
        return nullptr;
    }
    if (dev == cpu_device()) {
        static const dw_custom_op on_cpu = find_op(dev, dw::top_rows::signature);
        return &on_cpu;
    }
    static const dw_custom_op on_gpu = find_op(dev, dw::top_rows::signature);
    return &on_gpu;
}

} // namespace

void results::let_go() {
    llama_synchronize(attached_.ctx);
    attached_.outputs.copy_kept();
    attached_.outputs = {};
    forget();
}

// Other devices than CPU and CUDA are better asked for all rows at once than for what is needed of each.
results::results(attachment & attached, const ggml_tensor * head, bool always) :
    attached_(attached),
    backend_(head && head->buffer ? backend_of(attached.ctx, head) : nullptr) {
    ggml_backend_t cpu = cpu_backend(attached.ctx);
    on_gpu_            = backend_ && backend_ != cpu && find_top_rows(ggml_backend_get_device(backend_));
    if (!on_gpu_) {
        backend_ = cpu;
    }
    const int32_t n_devices = n_gpus(attached.ctx);
    attached.keeps_outputs  = on_gpu_ || n_devices == 0;
    if (on_gpu_ || (backend_ && always)) {
        attached.top_rows = find_top_rows(ggml_backend_get_device(backend_));
    }
    if (on_gpu_) {
        attached.copies = (dw::copies) find_in_registry(ggml_backend_get_device(backend_), dw::copies_name);
        // one event a graph says when its inputs are there: one device's
        attached.async_inputs = n_devices == 1 && attached.copies;
        attached.set_kv_steps(few_rows_step, kv_step);
    }
}

void results::locate_rows() {
    top_        = in_one_graph() ? attached_.outputs.tail.top : nullptr;
    few_logits_ = attached_.outputs.tail.few_logits;
    is_lost_    = few_logits_ && attached_.outputs.n_ubatches > 1;
}

void results::ask(fetched_values & rows, const ggml_tensor * top) {
    if (!on_gpu_ || !top) {
        return;
    }
    try {
        rows.ask(backend_, attached_.copies, top, ggml_nbytes(top));
    } catch (const failure &) { // the decode is done: fetch() asks again, and its caller is told
    }
}

void results::decoded(bool is_read) {
    forget();
    locate_rows();
    if (on_gpu_) {
        ready_.record(backend_);
    }
    if (is_read) {
        ask(fetched_[newest_], top_);
    }
}

void results::queue_begins() {
    drop_pending();
    pending_ = std::exchange(attached_.outputs, {}); // the newest decode's, for as long as this one is being queued
}

void results::queued(bool is_there) {
    std::swap(pending_, attached_.outputs);
    has_pending_ = is_there && pending_.n_ubatches == 1 && pending_.tail.top;
    if (has_pending_) {
        ask(fetched_[1 - newest_], pending_.tail.top);
    } else {
        drop_pending();
    }
}

void results::take_pending() {
    forget_newest();
    attached_.outputs = std::exchange(pending_, {});
    has_pending_      = false;
    newest_           = 1 - newest_;
    locate_rows();
    if (on_gpu_) {
        ready_.record(backend_);
    }
}

void results::drop_pending() noexcept {
    fetched_[1 - newest_].forget();
    has_pending_ = false;
    pending_     = {};
}

void results::wait_for(ggml_backend_t reader) const {
    if (on_gpu_) {
        ready_.wait(reader);
    }
}

void results::taken_by(ggml_backend_t reader) {
    if (on_gpu_) {
        taken_.record(reader);
        taken_.wait(backend_);
    }
}

void results::forget() {
    forget_newest();
    drop_pending();
}

void results::forget_newest() {
    fetched_[newest_].forget();
    host_       = nullptr;
    top_        = nullptr;
    few_logits_ = nullptr;
    is_lost_    = false;
}

result_rows results::hidden() const {
    if (in_one_graph()) {
        return { attached_.outputs.hidden(), nullptr };
    }
    return { nullptr, llama_get_embeddings_nextn(attached_.ctx) };
}

result_rows results::layer_input(int32_t il) const {
    if (in_one_graph()) {
        return { attached_.outputs.layer_input(il), nullptr };
    }
    return { nullptr, llama_get_embeddings_layer_inp(attached_.ctx, il) };
}

// Waits for the rows on the host, and copies their ids to where they can be read as integers.
void results::fetch() {
    fetched_values & rows = fetched_[newest_];
    if (!rows.is_asked()) {
        rows.ask(backend_, attached_.copies, top_, ggml_nbytes(top_));
    }
    host_ = (const float *) rows.get();
    ids_.clear();
    for (int64_t i = 0; i < top_->ne[1]; ++i) {
        const dw::top_rows::row_reader row(host_ + i * top_->ne[0], dw_n_top);
        for (int64_t rank = 0; rank < dw_n_top; ++rank) {
            ids_.push_back(row.id(rank));
        }
    }
}

void results::wait_for_top() {
    if (!host_) {
        fetch();
    }
}

top_row results::top(int32_t i) {
    wait_for_top();
    const int64_t                  last = top_->ne[1] - 1;
    const int64_t                  at   = i < 0 ? last : std::min<int64_t>(i, last);
    const dw::top_rows::row_reader row(host_ + at * top_->ne[0], dw_n_top);
    return { ids_.data() + at * dw_n_top, row.logits(), row.log_sum() };
}

// A short head's are read where they were computed.
logit_row results::logits(int32_t i) {
    if (!few_logits_) {
        const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(attached_.ctx)));
        return { llama_get_logits_ith(attached_.ctx, i), n_vocab };
    }
    const int64_t n    = few_logits_->ne[0];
    const int64_t last = few_logits_->ne[1] - 1;
    const int64_t at   = i < 0 ? last : std::min<int64_t>(i, last);
    llama_synchronize(attached_.ctx);
    if (is_on_host(few_logits_)) {
        return { (const float *) few_logits_->data + at * n, (int32_t) n };
    }
    few_row_.resize(n);
    ggml_backend_tensor_get(few_logits_, few_row_.data(), at * few_logits_->nb[1], few_logits_->nb[1]);
    return { few_row_.data(), (int32_t) n };
}

} // namespace draftwood
