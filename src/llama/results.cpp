// See results.h.

#include "llama/results.h"

#include "llama-context.h"
#include "llama-ext.h"
#include "ops/door/registry.h"
#include "ops/top-rows/top-rows.h"

#include <algorithm>

namespace draftwood {

namespace {

constexpr uint32_t kv_step = 1024; // a graph of a GPU serves so many tokens before it is built anew

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

int32_t n_gpus(llama_context * ctx) {
    ggml_backend_sched_t sched = ctx->get_sched();
    int32_t              n     = 0;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        ggml_backend_dev_t dev  = ggml_backend_get_device(ggml_backend_sched_get_backend(sched, i));
        const auto         kind = ggml_backend_dev_type(dev);
        n += kind == GGML_BACKEND_DEVICE_TYPE_CPU || kind == GGML_BACKEND_DEVICE_TYPE_ACCEL ? 0 : 1;
    }
    return n;
}

} // namespace

ggml_backend_t backend_of(llama_context * ctx, const ggml_tensor * tensor) {
    if (ggml_backend_buffer_is_host(tensor->buffer)) {
        return dw_cpu_backend(ctx);
    }
    ggml_backend_sched_t sched = ctx->get_sched();
    ggml_backend_dev_t   dev   = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(tensor->buffer));
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);
        if (ggml_backend_get_device(backend) == dev) {
            return backend;
        }
    }
    return nullptr;
}

void results::let_go() {
    llama_synchronize(ctx_);
    dw_hook_read(&state_);
    state_.result     = nullptr;
    state_.top        = nullptr;
    state_.n_ubatches = 0;
    forget();
}

// Other devices than CPU and CUDA are better asked for all rows at once than for what is needed of each.
results::results(llama_context * ctx, dw_state & state, const ggml_tensor * head, bool always) :
    ctx_(ctx),
    state_(state),
    backend_(head && head->buffer ? backend_of(ctx, head) : nullptr),
    on_gpu_(backend_ && backend_ != dw_cpu_backend(ctx) && find_top_rows(ggml_backend_get_device(backend_))) {
    if (!on_gpu_) {
        backend_ = dw_cpu_backend(ctx);
    }
    state_.keeps = on_gpu_ || n_gpus(ctx) == 0;
    if (on_gpu_ || (backend_ && always)) {
        state_.top_rows = find_top_rows(ggml_backend_get_device(backend_));
    }
    if (on_gpu_) {
        state_.async_inputs = n_gpus(ctx) == 1; // an event a graph tells when its inputs are there: one device's
        state_.kv_step      = kv_step;
    }
}

void results::decoded() {
    host_.clear();
    top_ = in_one_graph() ? state_.top : nullptr;
    if (on_gpu_) {
        ready_.record(backend_);
    }
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
    host_.clear();
    top_ = nullptr;
}

result_rows results::hidden() const {
    if (in_one_graph()) {
        return { state_.result->get_h_nextn(), nullptr };
    }
    return { nullptr, llama_get_embeddings_nextn(ctx_) };
}

result_rows results::layer_input(int32_t il) const {
    if (in_one_graph()) {
        return { state_.result->get_layer_inp(il), nullptr };
    }
    return { nullptr, llama_get_embeddings_layer_inp(ctx_, il) };
}

// Copies the rows to the host, and their ids to where they can be read as integers.
void results::fetch() {
    host_.resize(ggml_nelements(top_));
    ggml_backend_tensor_get_async(backend_, top_, host_.data(), 0, host_.size() * sizeof(float));
    ggml_backend_synchronize(backend_);
    ids_.clear();
    for (int64_t i = 0; i < top_->ne[1]; ++i) {
        const dw::top_rows::row_reader row(host_.data() + i * top_->ne[0], dw_n_top);
        for (int64_t rank = 0; rank < dw_n_top; ++rank) {
            ids_.push_back(row.id(rank));
        }
    }
}

top_row results::top(int32_t i) {
    if (host_.empty()) {
        fetch();
    }
    const int64_t                  last = top_->ne[1] - 1;
    const int64_t                  at   = i < 0 ? last : std::min<int64_t>(i, last);
    const dw::top_rows::row_reader row(host_.data() + at * top_->ne[0], dw_n_top);
    return { ids_.data() + at * dw_n_top, row.logits(), row.log_sum() };
}

} // namespace draftwood
