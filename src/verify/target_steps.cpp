// Plain steps that are queued before their token is known: see target_context.h.

#include "llama/decode.h"
#include "llama/facts.h"
#include "llama/graph_store.h"
#include "llama/memory.h"
#include "llama/row_copies.h"
#include "llama/tensor_bytes.h"
#include "verify/target_context.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace draftwood {

namespace {

constexpr int64_t least_waited = 16; // a part of a step's time

constexpr graph_shape shape_of_step(int32_t slot) {
    return { verify_kind::none, /*part*/ 0, slot, /*n_rows*/ 1 };
}

} // namespace

// Other architectures may read a token elsewhere than in its embedding, or have other memories. Weights on a CPU are
// wherever its kernels want them.
bool target_context::is_on_one_device(const llama_context * ctx) {
    const llama_model * model  = llama_get_model(ctx);
    const auto          memory = hybrid_memory::of(ctx);
    const ggml_tensor * head   = output_head(model).weights;
    if (!is_qwen35(architecture(model)) || !memory || !head || head->ne[1] < dw_n_top) {
        return false;
    }
    std::vector<const ggml_tensor *> all{ head, token_embeddings(model) };
    if (!is_on_host(head)) {
        const auto weights = tensors_of(model);
        std::copy_if(weights.begin(), weights.end(), std::back_inserter(all),
                     [](const ggml_tensor * each) { return buffer_of(each) != nullptr; });
    }
    for (const auto & layer : memory->recurrent_layers()) {
        all.insert(all.end(), { layer.states, layer.conv_states });
    }
    for (const auto & layer : memory->attention_layers()) {
        all.insert(all.end(), { layer.keys, layer.values });
    }
    return are_together(all);
}

// Embeddings go to the host with each decode, and samplers in graphs keep what they chose there.
bool target_context::can_queue_step(llama_seq_id seq) const {
    const graph_flags flags    = graph_flags_of(target_);
    const bool        is_plain = !flags.embeddings && !flags.samplers;
    const bool        is_fed   = attached_.async_inputs || !results_.on_gpu();
    return is_on_one_device_ && !steps_fail_ && !step_ && is_plain && is_fed && attached_.keeps_outputs &&
           results_.has_top() && memory_fork::is_possible(target_, seq);
}

// Two graphs take turns, so that one's results can be read while the other runs.
void target_context::queue_step(const place & at, int64_t & n_dropped) {
    decode_request request;
    request.slot = 1 - slot_;
    std::optional<memory_marks> marks;
    try {
        if (!attached_.graphs->reserve(shape_of_step(request.slot))) {
            return;
        }
        const llama_token unknown = 0;
        batch_.clear();
        batch_.add(unknown, at.pos, true, at.seq);
        request.feeds.push_back({ row_feed::token, 0, results_.device_top(), 0, sizeof(llama_token), results_.backend(),
                                  /*same_device*/ true }); // a row begins with its best token
        marks.emplace(target_, std::vector<place>{ at });
        step_.emplace(queued_step{ at, memory_fork(target_, at.seq, at.pos), graph_flags_of(target_), &n_dropped });
    } catch (const std::exception &) {
        return; // nothing was decoded
    }
    if (!left_) {
        left_ = state_place{ at.seq, step_->fork.cell_before() };
    }
    request.fork = &step_->fork;
    run_step(*marks, request);
}

void target_context::run_step(const memory_marks & marks, const decode_request & request) {
    results_.queue_begins();
    std::string why;
    int32_t     rc = -3;
    try {
        rc = attempt(marks, request, [] {}, why);
    } catch (const std::exception &) { // no memory to take the marks back
        intact_ = false;
    }
    results_.queued(rc == 0);
    if (results_.has_pending()) {
        slot_ = request.slot;
        return;
    }
    if (rc == 0) {
        step_->fork.undo(); // its graph found no memory for the best tokens
    }
    step_.reset(); // else the marks took it back
    if (!attached_.graphs->found_memory()) {
        attached_.graphs->unselect();
    }
    restore_one_row(attached_);
    uncount_step(attached_);
    steps_fail_ = rc != 2; // who aborts one does not mean all
    if (!intact_) {
        fail(DW_ERR_DECODE, "a step that was queued failed with code %d, and the memory is unknown", rc);
    }
}

// Where none is queued any more, its graph's memory is free for others.
void target_context::drop_place_of_steps() {
    attached_.graphs->drop(shape_of_step(/*slot*/ 1));
}

// Steps write two cells in turns, and the graphs of other decodes are kept for the one that they came from: a copy of a
// state takes less than a graph.
void target_context::bring_state_back() {
    const auto left   = std::exchange(left_, {});
    auto       memory = hybrid_memory::of(target_);
    if (!left || !memory) {
        return;
    }
    const std::vector<row_piece> copies = memory->move_state(left->seq, left->cell);
    if (!copies.empty()) {
        const row_copies copy = results_.on_gpu() ? attached_.copies : copy_on_host;
        copy(results_.backend(), copies.data(), (int) copies.size());
    }
}

bool target_context::take_step(llama_seq_id seq, llama_token token) {
    const bool is_current = step_ && step_->at.seq == seq && results_.has_pending() && attached_.graphs->is_current() &&
                            step_->flags == graph_flags_of(target_);
    if (!is_current || results_.top(-1).tokens[0] != token) {
        return false;
    }
    step_->fork.keep(token);
    step_.reset();
    results_.take_pending();
    return true;
}

void target_context::drop_step() noexcept {
    if (step_) {
        step_->fork.undo();
        ++*step_->n_dropped;
        step_.reset();
        results_.drop_pending();
        uncount_step(attached_);
    }
}

// Whoever comes late does not know when a step was done.
int64_t target_context::wait_for_rows() {
    const int64_t before = rows_came_us_, start = ggml_time_us();
    get_rows();
    rows_came_us_        = ggml_time_us();
    const int64_t since  = before > 0 ? rows_came_us_ - before : 0;
    const int64_t waited = rows_came_us_ - start;
    return waited > since / least_waited ? since : 0;
}

void target_context::get_rows() {
    try {
        if (step_) {
            results_.wait_for_top();
            count_step(attached_);
            return;
        }
    } catch (const failure &) { // no memory for the best tokens on the host: whoever samples asks again
        drop_step();
    }
    llama_synchronize(target_);
}

} // namespace draftwood
