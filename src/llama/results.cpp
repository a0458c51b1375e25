// See results.h.

#include "llama/results.h"

#include "llama-ext.h"
#include "llama/backends.h"
#include "ops/door/registry.h"

#include <algorithm>

namespace draftwood {

namespace {

constexpr uint32_t kv_step = 1024; // a graph of a GPU serves so many tokens before it is built anew

// op dw_top_rows for a device; nullptr: it has none. Kept graphs point to it.
const dw_custom_op * find_top_rows(ggml_backend_dev_t dev) {
    if (!has_op(dev, "dw_top_rows")) {
        return nullptr;
    }
    if (dev == cpu_device()) {
        static const dw_custom_op on_cpu = find_op(dev, "dw_top_rows");
        return &on_cpu;
    }
    static const dw_custom_op on_gpu = find_op(dev, "dw_top_rows");
    admit_op(dev, on_gpu);
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
        attached.async_inputs = n_devices == 1; // one event a graph says when its inputs are there: one device's
        attached.set_kv_step(kv_step);
    }
}

void results::decoded() {
    host_.clear();
    top_ = in_one_graph() ? attached_.outputs.top : nullptr;
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

top_row results::top(int32_t i) {
    const int64_t n_values = 2 * dw_n_top + 2;
    if (host_.empty()) {
        host_.resize(ggml_nelements(top_));
        ggml_backend_tensor_get_async(backend_, top_, host_.data(), 0, host_.size() * sizeof(float));
        ggml_backend_synchronize(backend_);
    }
    const int64_t last = top_->ne[1] - 1;
    const float * row  = host_.data() + (i < 0 ? last : std::min<int64_t>(i, last)) * n_values;
    return { (const int32_t *) row, row + dw_n_top, row[2 * dw_n_top + 1] };
}

} // namespace draftwood
