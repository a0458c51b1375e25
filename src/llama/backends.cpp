// See backends.h.

#include "llama/backends.h"

#include "ggml-cpu.h"
#include "llama-context.h"
#include "llama/tensor_bytes.h"
#include "ops/door/registry.h"

namespace draftwood {

namespace {

constexpr size_t to_spare = size_t(32) << 20; // bytes of a device

// the first backend of `ctx` for which `is` holds; nullptr: none
template <typename F> ggml_backend_t find_backend(llama_context * ctx, F is) {
    ggml_backend_sched_t sched = ctx->get_sched();
    for (int i = 0; sched && i < ggml_backend_sched_get_n_backends(sched); ++i) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);
        if (is(ggml_backend_get_device(backend))) {
            return backend;
        }
    }
    return nullptr;
}

} // namespace

ggml_backend_t cpu_backend(llama_context * ctx) noexcept {
    return find_backend(
        ctx, [](ggml_backend_dev_t dev) { return dev && ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU; });
}

ggml_backend_t backend_of(llama_context * ctx, const ggml_tensor * tensor) {
    if (is_on_host(tensor)) {
        return cpu_backend(ctx);
    }
    ggml_backend_dev_t of_tensor = ggml_backend_buft_get_device(buffer_type_of(tensor));
    return find_backend(ctx, [&](ggml_backend_dev_t dev) { return dev == of_tensor; });
}

int32_t n_gpus(llama_context * ctx) {
    int32_t n = 0;
    find_backend(ctx, [&](ggml_backend_dev_t dev) {
        const auto type = ggml_backend_dev_type(dev);
        n += type == GGML_BACKEND_DEVICE_TYPE_CPU || type == GGML_BACKEND_DEVICE_TYPE_ACCEL ? 0 : 1;
        return false;
    });
    return n;
}

bool splits_tensors(llama_context * ctx) {
    return find_backend(
        ctx, [](ggml_backend_dev_t dev) { return dev && ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_META; });
}

bool has_spare_memory(ggml_backend_t backend, size_t n_bytes) {
    ggml_backend_dev_t dev  = ggml_backend_get_device(backend);
    size_t             free = 0, total = 0;
    if (dev && ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_GPU) {
        ggml_backend_dev_memory(dev, &free, &total);
    }
    return total == 0 || free >= n_bytes + to_spare;
}

// Looked up by name, since the CPU backend may be a module of its own (GGML_BACKEND_DL).
bool use_exact_kernels(ggml_backend_t backend_cpu, bool exact) noexcept {
    using function                 = decltype(&ggml_backend_cpu_set_use_ref);
    ggml_backend_dev_t dev         = ggml_backend_get_device(backend_cpu);
    const auto         set_use_ref = (function) find_in_registry(dev, "ggml_backend_cpu_set_use_ref");
    if (set_use_ref) {
        set_use_ref(backend_cpu, exact);
    }
    return set_use_ref != nullptr;
}

} // namespace draftwood
