// One graph and one scheduler per number of rows and variant: see graphs.h.

#include "llama/graph_store.h"

#include "llama-context.h"

#include <algorithm>
#include <vector>

namespace {

constexpr size_t to_spare = size_t(32) << 20; // bytes of a device

// a scheduler over the same backends, without buffers yet
ggml_backend_sched_t make_like(ggml_backend_sched_t sched, const llama_context & ctx) {
    std::vector<ggml_backend_t>             backends;
    std::vector<ggml_backend_buffer_type_t> types;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        backends.push_back(ggml_backend_sched_get_backend(sched, i));
        types.push_back(ggml_backend_sched_get_buffer_type(sched, backends.back()));
    }
    const llama_cparams & cparams   = ctx.get_cparams();
    const size_t          max_nodes = ctx.graph_max_nodes(std::min(cparams.n_ctx, cparams.n_ubatch));
    return ggml_backend_sched_new(backends.data(), types.data(), (int) backends.size(), max_nodes,
                                  /*parallel*/ false, cparams.op_offload);
}

} // namespace

void dw_graph_store::select(int64_t n_rows, int32_t variant, bool verifies, llm_graph_result_ptr & result,
                            llm_graph_result *& reusable, ggml_backend_sched_ptr & sched) {
    result_        = &result;
    reusable_      = &reusable;
    sched_         = &sched;
    const bool own = n_rows == 0 || short_of_memory() || (variant == 0 && n_rows > max_rows);
    swap_to(own ? shape{} : shape{ variant, n_rows });
    if (own) {
        enter_own(verifies ? variant : 0);
    }
    wait_for_copies();
    is_allocated_ = false;
}

// llama.cpp compares sizes only, when it looks whether a graph can be reused.
void dw_graph_store::enter_own(int32_t variant) {
    if (own_variant_ != variant) {
        *reusable_   = nullptr;
        own_variant_ = variant;
    }
}

bool dw_graph_store::fits() const {
    for (int i = 0; current_ != shape{} && i < ggml_backend_sched_get_n_backends(sched_->get()); ++i) {
        ggml_backend_dev_t dev  = ggml_backend_get_device(ggml_backend_sched_get_backend(sched_->get(), i));
        size_t             free = 0, total = 0;
        if (dev && ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_GPU) {
            ggml_backend_dev_memory(dev, &free, &total);
        }
        if (total > 0 && free < to_spare) {
            return false;
        }
    }
    return true;
}

void dw_graph_store::copied(ggml_backend_t backend) {
    auto & event = copies_[current_];
    if (!event) {
        event.reset(ggml_backend_event_new(ggml_backend_get_device(backend)));
    }
    if (event) {
        ggml_backend_event_record(event.get(), backend);
    } else {
        ggml_backend_synchronize(backend);
    }
}

void dw_graph_store::wait_for_copies() {
    const auto event = copies_.find(current_);
    if (event != copies_.end() && event->second) {
        ggml_backend_event_synchronize(event->second.get());
    }
}

// What llama.cpp did to the context since the last decode. A new scheduler (after a change of adapters, samplers or
// outputs) is the context's own, and the kept ones have budgets and reservations of before; a dropped graph (after a
// change of the memory) makes the kept ones as old.
void dw_graph_store::notice_changes() {
    if (distrusted_) {
        *reusable_  = nullptr;
        distrusted_ = false;
    }
    if (seen_ && seen_ != sched_->get()) {
        slots_.clear();
        current_     = {};
        own_variant_ = 0;
    }
    if (!is_allocated_ && seen_ == sched_->get()) {
        mend();
    }
    is_allocated_ = true;
    if (!*reusable_) {
        for (auto & [_, slot] : slots_) {
            slot.built = false;
        }
    }
    seen_ = sched_->get();
}

// A scheduler whose graph found no memory has lost its old buffer and takes the new one for granted the next time
// (ggml-alloc.c, ggml_gallocr_reserve_n_impl): another takes its place. What the graphs of other sizes hold is set
// free.
void dw_graph_store::mend() {
    short_of_memory_ = true;
    for (auto it = slots_.begin(); it != slots_.end();) {
        const bool in_use = it->first == shape{} || it->first == current_;
        it                = in_use ? std::next(it) : slots_.erase(it);
    }
    sched_->reset(make_like(sched_->get(), *ctx_));
    seen_ = sched_->get();
}

void dw_graph_store::swap_to(shape wanted) {
    notice_changes();
    if (wanted == current_) {
        return;
    }
    slot & next = slots_[wanted];
    if (!next.sched) {
        next.sched.reset(make_like(sched_->get(), *ctx_));
    }
    slot & last    = slots_[current_];
    last.built     = *reusable_ && *reusable_ == result_->get();
    last.result    = std::move(*result_);
    last.sched     = std::move(*sched_);
    last.last_used = ++clock_;

    *result_   = std::move(next.result);
    *sched_    = std::move(next.sched);
    *reusable_ = next.built ? result_->get() : nullptr;
    current_   = wanted;
    seen_      = sched_->get();
    drop_oldest();
}

void dw_graph_store::drop_oldest() {
    if (slots_.size() <= max_kept) {
        return;
    }
    auto oldest = slots_.end();
    for (auto it = slots_.begin(); it != slots_.end(); ++it) {
        const bool in_use = it->first == shape{} || it->first == current_;
        if (!in_use && (oldest == slots_.end() || it->second.last_used < oldest->second.last_used)) {
            oldest = it;
        }
    }
    slots_.erase(oldest);
}

void dw_graph_store::restore() {
    if (sched_) {
        swap_to({});
    }
    wait_for_copies();
}

void dw_graph_store::forget_verifies() {
    restore();
    for (auto it = slots_.begin(); it != slots_.end();) {
        it = it->first.first != 0 ? slots_.erase(it) : std::next(it);
    }
    if (sched_) {
        enter_own(0);
    }
}
