// See graph_store.h.

#include "llama/graph_store.h"

#include "llama-context.h"
#include "llama/backends.h"
#include "llama/context_members.h"
#include "llama/sched-inputs.h"

#include <algorithm>
#include <vector>

namespace draftwood {

namespace {

using members = dw_context_graph;

// nodes that a graph of so many rows may have, as llama.cpp counts them
int64_t max_nodes_of(const llama_context & ctx, int64_t n_rows) {
    const llama_cparams & cparams = ctx.get_cparams();
    const uint32_t        most    = std::min(cparams.n_ctx, cparams.n_ubatch);
    return ctx.graph_max_nodes(n_rows > 0 ? std::min<uint32_t>((uint32_t) n_rows, most) : most);
}

// a scheduler over the same backends, without buffers yet
ggml_backend_sched_t make_like(ggml_backend_sched_t sched, const llama_context & ctx, int64_t max_nodes) {
    std::vector<ggml_backend_t>             backends;
    std::vector<ggml_backend_buffer_type_t> types;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        backends.push_back(ggml_backend_sched_get_backend(sched, i));
        types.push_back(ggml_backend_sched_get_buffer_type(sched, backends.back()));
    }
    return ggml_backend_sched_new(backends.data(), types.data(), (int) backends.size(), (size_t) max_nodes,
                                  /*parallel*/ false, ctx.get_cparams().op_offload);
}

// compute buffers, the arena of the graph's tensors and the scheduler's copy of the graph
size_t bytes_of(ggml_backend_sched_t sched, const llm_graph_result * result) {
    size_t sum = 0;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        sum += ggml_backend_sched_get_buffer_size(sched, ggml_backend_sched_get_backend(sched, i));
    }
    const size_t n_nodes = result ? (size_t) result->get_max_nodes() : 0;
    return sum + n_nodes * ggml_tensor_overhead() + 2 * ggml_graph_overhead_custom(n_nodes, /*grads*/ false);
}

} // namespace

graph_store::~graph_store() {
    forget_verifies();
    share_.held -= counted_;
}

// A backend that splits tensors knows those of the newest graph alone (ggml-backend-meta.cpp, graph_compute).
bool graph_store::has_own_place(const graph_shape & wanted) const {
    const bool too_many = wanted.verify == verify_kind::none && wanted.slot == 0 && wanted.n_rows > max_rows;
    return wanted.n_rows > 0 && !short_of_memory() && !too_many && !splits_tensors(ctx_);
}

void graph_store::select(const graph_shape & wanted, bool keeps_newest) {
    const bool own = !has_own_place(wanted);
    before_        = current_;
    swap_to(own ? graph_shape{} : wanted, keeps_newest);
    if (own) {
        enter_own(wanted);
    }
    wait_for_copies();
    is_allocated_ = false;
}

bool graph_store::is_current() const noexcept {
    return seen_ == ctx_->get_sched() && !members::is_changed(*ctx_) && !distrusted_;
}

bool graph_store::reserve(const graph_shape & wanted) {
    if (!is_current() || wanted == current_ || !has_own_place(wanted)) {
        return false;
    }
    place_of(wanted);
    slots_[current_];
    return true;
}

void graph_store::drop(const graph_shape & shape) {
    if (slots_.count(shape) == 0) {
        return;
    }
    if (current_ == shape) {
        swap_to({});
    }
    slots_.erase(shape);
    count_bytes();
}

void graph_store::unselect() {
    const graph_shape failed = current_;
    if (failed == before_) {
        return;
    }
    is_allocated_ = true; // else it would be mended, and graphs took turns from now on
    swap_to(before_);
    slots_.erase(failed);
    count_bytes();
}

void graph_store::distrust() noexcept {
    members::reusable(*ctx_) = nullptr;
    distrusted_              = true;
}

// llama.cpp compares sizes only, when it looks whether a graph can be reused.
void graph_store::enter_own(const graph_shape & wanted) {
    const graph_shape verify = wanted.verify == verify_kind::none ? graph_shape{} : wanted;
    if (own_verify_.verify != verify.verify || own_verify_.part != verify.part) {
        members::reusable(*ctx_) = nullptr;
        own_verify_              = verify;
    }
}

bool graph_store::fits() const {
    if (current_ == graph_shape{}) { // the context's own place, which llama.cpp has set aside
        return true;
    }
    ggml_backend_sched_t sched = ctx_->get_sched();
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        if (!has_spare_memory(ggml_backend_sched_get_backend(sched, i), 0)) {
            return false;
        }
    }
    return true;
}

void graph_store::copied(ggml_backend_t backend) {
    if (!copied_) {
        copied_.reset(ggml_backend_event_new(ggml_backend_get_device(backend)));
    }
    if (copied_) {
        ggml_backend_event_record(copied_.get(), backend);
    } else {
        ggml_backend_synchronize(backend);
    }
}

void graph_store::wait_for_copies() {
    if (copied_) {
        ggml_backend_event_synchronize(copied_.get());
    }
}

// What llama.cpp did to the context since the last decode. A new scheduler (after a change of adapters, samplers or
// outputs) is the context's own, and the kept ones have budgets and reservations of before. A dropped graph (after a
// change of the memory) makes the kept ones as old.
void graph_store::notice_changes() {
    ggml_backend_sched_t sched = ctx_->get_sched();
    if (distrusted_) {
        members::reusable(*ctx_) = nullptr;
        distrusted_              = false;
    }
    if (seen_ && seen_ != sched) {
        slots_.clear();
        current_    = {};
        own_verify_ = {};
    }
    if (!is_allocated_ && seen_ == sched) {
        mend();
    }
    is_allocated_ = true;
    if (!members::reusable(*ctx_)) {
        for (auto & [_, slot] : slots_) {
            slot.built = false;
        }
    }
    seen_ = ctx_->get_sched();
}

// A scheduler whose graph found no memory has lost its old buffer and takes the new one for granted the next time
// (ggml-alloc.c, ggml_gallocr_reserve_n_impl): another takes its place. What the graphs of other shapes hold is set
// free.
void graph_store::mend() {
    short_of_memory_ = true;
    for (auto it = slots_.begin(); it != slots_.end();) {
        const bool in_use = it->first == graph_shape{} || it->first == current_;
        it                = in_use ? std::next(it) : slots_.erase(it);
    }
    const int64_t max_nodes = max_nodes_of(*ctx_, current_.n_rows);
    members::sched(*ctx_).reset(make_like(ctx_->get_sched(), *ctx_, max_nodes));
    seen_ = ctx_->get_sched();
}

graph_store::slot & graph_store::place_of(const graph_shape & wanted) {
    slot & place = slots_[wanted];
    if (!place.sched) {
        const int64_t max_nodes = max_nodes_of(*ctx_, wanted.n_rows);
        place.result.reset(new llm_graph_result(max_nodes)); // first: a slot with a scheduler is whole
        place.sched.reset(make_like(members::sched(*ctx_).get(), *ctx_, max_nodes));
    }
    return place;
}

void graph_store::swap_to(const graph_shape & wanted, bool keeps_newest) {
    notice_changes();
    count_bytes();
    if (wanted == current_) {
        return;
    }
    llm_graph_result_ptr &   result   = members::result(*ctx_);
    llm_graph_result *&      reusable = members::reusable(*ctx_);
    ggml_backend_sched_ptr & sched    = members::sched(*ctx_);
    slot &                   next     = place_of(wanted);
    *dw_sched_inputs_of(sched.get())  = {}; // what comes back to it may be somebody else's
    slot & last                       = slots_[current_];
    last.built                        = reusable && reusable == result.get();
    last.result                       = std::move(result);
    last.sched                        = std::move(sched);
    last.copied                       = std::move(copied_);
    last.last_used                    = ++clock_;
    last.bytes                        = bytes_of(last.sched.get(), last.result.get());

    result   = std::move(next.result);
    sched    = std::move(next.sched);
    copied_  = std::move(next.copied);
    reusable = next.built ? result.get() : nullptr;
    current_ = wanted;
    seen_    = sched.get();
    count_bytes();
    while ((slots_.size() > max_kept || !share_.has_room(0)) && drop_oldest(keeps_newest)) {
        count_bytes();
    }
}

bool graph_store::holds(const ggml_cgraph * graph) const {
    const auto is = [&](const llm_graph_result_ptr & result) { return result && result->get_gf() == graph; };
    return is(members::result(*ctx_)) ||
           std::any_of(slots_.begin(), slots_.end(), [&](const auto & each) { return is(each.second.result); });
}

size_t graph_store::bytes() const {
    size_t sum = 0;
    for (const auto & [shape, slot] : slots_) {
        sum += shape == graph_shape{} ? 0 : slot.bytes;
    }
    return sum;
}

void graph_store::count_bytes() {
    const int64_t now = (int64_t) bytes();
    share_.held += now - counted_;
    counted_ = now;
}

// The context's own graph and the one in its place stay. Returns false if there are no others.
bool graph_store::drop_oldest(bool keeps_newest) {
    auto oldest = slots_.end();
    for (auto it = slots_.begin(); it != slots_.end(); ++it) {
        const bool is_read = keeps_newest && it->second.last_used == clock_;
        const bool in_use  = it->first == graph_shape{} || it->first == current_ || is_read;
        if (!in_use && (oldest == slots_.end() || it->second.last_used < oldest->second.last_used)) {
            oldest = it;
        }
    }
    if (oldest == slots_.end()) {
        return false;
    }
    slots_.erase(oldest);
    return true;
}

void graph_store::forget_verifies() {
    if (seen_) { // else nothing was ever selected
        swap_to({});
    }
    wait_for_copies();
    for (auto it = slots_.begin(); it != slots_.end();) {
        it = it->first.verify != verify_kind::none ? slots_.erase(it) : std::next(it);
    }
    if (seen_) {
        enter_own({});
    }
    count_bytes();
}

} // namespace draftwood
