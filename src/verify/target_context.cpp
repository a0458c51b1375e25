// See target_context.h.

#include "verify/target_context.h"

#include "llama/facts.h"
#include "llama/graph_store.h"
#include "llama/memory.h"

#include <algorithm>

namespace draftwood {

std::shared_ptr<target_context> target_context::of(llama_context * target, int32_t exact_rows, bool always_top) {
    if (const attachment * there = attachment::of(target)) {
        auto * known = dynamic_cast<target_context *>(there->listener);
        if (!known) {
            fail(DW_ERR_UNSUPPORTED, "the llama_context is a drafter's own; expected one that nothing is attached to");
        }
        if (there->exact_rows != exact_rows) {
            fail(DW_ERR_ARGUMENT, "exact_rows is %d; this llama_context's other engines have %d, expected the same",
                 exact_rows, there->exact_rows);
        }
        return known->shared_from_this();
    }
    return std::shared_ptr<target_context>(new target_context(target, exact_rows, always_top));
}

target_context * target_context::find(const llama_context * target) noexcept {
    const attachment * there = attachment::of(target);
    return there ? dynamic_cast<target_context *>(there->listener) : nullptr;
}

target_context::target_context(llama_context * target, int32_t exact_rows, bool always_top) :
    target_(target),
    attached_(target, exact_rows, this, model_attachment::of(llama_get_model(target))),
    batch_(target),
    results_(attached_, output_head(llama_get_model(target)).weights, always_top),
    is_on_one_device_(is_on_one_device(target)) {}

target_context::~target_context() {
    results_.let_go(); // llama.cpp's callers may read the last decode's later
}

// Rows of the other sequences lose their logits.
void target_context::on_decode(const sequence_set & into) noexcept {
    if (!at_work_) {
        drop_step();
        each_listener([&](member & each) { each.listener->on_flush(into.has(each.seq)); });
        results_.forget();
        finish_trees();
    }
}

// Those of other sequences stay open, and so do their results.
void target_context::on_save(const sequence_set & of) noexcept {
    if (!at_work_) {
        drop_step();
        each_listener([&](member & each) {
            if (of.has(each.seq)) {
                each.listener->on_flush(/*decodes*/ false);
            }
        });
        finish_trees();
    }
}

void target_context::on_replace(const sequence_set & of) noexcept {
    if (!at_work_) {
        on_save(of);
        each_listener([&](member & each) {
            if (of.has(each.seq)) {
                each.listener->on_replaced();
            }
        });
    }
}

void target_context::finish_trees() const {
    for (const auto & each : trees_) {
        each->finish();
    }
}

bool target_context::short_of_memory() const {
    return attached_.graphs->short_of_memory();
}

template <typename F> void target_context::each_listener(F f) {
    for (member & each : members_) {
        f(each);
    }
}

void target_context::add(llama_seq_id seq, sequence_listener & listener) {
    if (seq < 0 || seq >= (llama_seq_id) llama_n_seq_max(target_)) {
        fail(DW_ERR_ARGUMENT, "sequence %d; expected 0 to n_seq_max - 1 = %u", seq, llama_n_seq_max(target_) - 1);
    }
    each_listener([&](member & each) {
        if (each.seq == seq) {
            fail(DW_ERR_UNSUPPORTED, "sequence %d of this llama_context has an engine already; free that one first",
                 seq);
        }
    });
    members_.push_back({ seq, &listener });
    no_memory_ = INT32_MAX;
}

void target_context::remove(const sequence_listener & listener) noexcept {
    drop_step();
    const auto is = [&](const member & each) { return each.listener == &listener; };
    members_.erase(std::remove_if(members_.begin(), members_.end(), is), members_.end());
    no_memory_ = INT32_MAX;
}

void target_context::settle_all_but(const std::vector<place> & places) {
    each_listener([&](member & each) {
        const auto is = [&](const place & its) { return its.seq == each.seq; };
        if (std::none_of(places.begin(), places.end(), is)) {
            each.listener->on_flush(/*decodes*/ false);
        }
    });
}

int32_t target_context::row_limit(int32_t n_sequences) const {
    const int32_t fused = n_sequences > 1 ? std::max(1, attached_.fused_rows / n_sequences) : INT32_MAX;
    return std::min(row_limit_, fused);
}

void target_context::limit_rows(int32_t n_rows) {
    row_limit_ = 1;
    for (int32_t n = n_rows - 1; n > 1 && row_limit_ == 1; --n) {
        row_limit_ = bucket(n) == n ? n : 1;
    }
    forget_verifies(); // what they hold is free for smaller ones
}

void target_context::forget_verifies() {
    drop_step();
    results_.let_go();
    attached_.graphs->forget_verifies();
}

bool target_context::is_empty(llama_seq_id but) const {
    for (llama_seq_id seq = 0; seq < (llama_seq_id) llama_n_seq_max(target_); ++seq) {
        if (seq != but && llama_memory_seq_pos_max(llama_get_memory(target_), seq) >= 0) {
            return false;
        }
    }
    return true;
}

int32_t target_context::free_cells(llama_seq_id seq) const {
    return draftwood::free_cells(target_, seq);
}

// A larger tree state replaces the old one. Graphs that read the old one's tensors go, too.
void target_context::prepare_trees(int32_t n_rows, size_t i) {
    if (refused_ || (trees(i) && trees(i)->max_rows() >= n_rows)) {
        return;
    }
    std::string                 why_not;
    std::unique_ptr<tree_state> larger =
        tree_state::make(target_, n_rows, attached_.model->budget().tree_state, why_not);
    refusal_ = why_not;
    refused_ = !larger;
    if (larger) {
        settle_all_but({});
        forget_verifies();
        trees_.resize(std::max(trees_.size(), i + 1));
        trees_[i] = std::move(larger);
    }
}

bool target_context::grow_trees(int32_t n_rows, size_t i) {
    if (trees(i) && trees(i)->max_rows() >= n_rows) {
        return true;
    }
    if (n_rows >= no_memory_) {
        return false;
    }
    try {
        prepare_trees(n_rows, i);
    } catch (const failure & e) {
        if (e.code() != DW_ERR_MEMORY) {
            throw;
        }
        no_memory_ = n_rows;
    }
    return trees(i) && trees(i)->max_rows() >= n_rows;
}

} // namespace draftwood
