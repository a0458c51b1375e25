// How an engine is made, what it measures and counts: see engine.h. The round itself: engine_draft.cpp,
// engine_round.cpp.

#include "round/engine.h"

#include "drafters/ngram.h"
#include "round/load_schedule.h"

#include <algorithm>
#include <cmath>

namespace draftwood {

namespace {

// ggml-cuda runs a new graph, captures it the second time, and replays it from then on
constexpr int32_t n_warmup_on_gpu = 2;

template <size_t N> bool are_times(const double (&micros)[N]) {
    return std::all_of(micros, micros + N, [](double each) { return each >= 0.0 && std::isfinite(each); });
}

const dw_params & checked(llama_context * target, const dw_params & params) {
    if (params.exact_rows < 0) {
        fail(DW_ERR_ARGUMENT, "exact_rows is %d; expected 0 (off) or a number of rows", params.exact_rows);
    }
    if (!(params.draft_p_min >= 0.0f && params.draft_p_min <= 1.0f)) {
        fail(DW_ERR_ARGUMENT, "draft_p_min is %g; expected a probability from 0 to 1", params.draft_p_min);
    }
    if (params.draft_tokens < 1 || params.draft_tokens > DW_MAX_DRAFT) {
        fail(DW_ERR_ARGUMENT, "draft_tokens is %d; expected 1 to %d", params.draft_tokens, DW_MAX_DRAFT);
    }
    if (params.tree_budget < 0 || params.tree_budget > max_tree_nodes) {
        fail(DW_ERR_ARGUMENT, "tree_budget is %d; expected 0 (chains) or 1 to %d nodes", params.tree_budget,
             max_tree_nodes);
    }
    if (params.length != DW_LENGTH_FIXED && params.length != DW_LENGTH_AUTO) {
        fail(DW_ERR_ARGUMENT, "length is %d; expected a value of dw_length", params.length);
    }
    if (params.curve && !(are_times(params.curve->draft_us) && are_times(params.curve->verify_us))) {
        fail(DW_ERR_ARGUMENT, "the curve holds what is no time; expected microseconds, 0 where not known");
    }
    if (params.checkpoint_bytes < 0) {
        fail(DW_ERR_ARGUMENT, "checkpoint_bytes is %lld; expected 0 (none) or more",
             (long long) params.checkpoint_bytes);
    }
    if (params.drafter == DW_DRAFTER_NONE) {
        return params;
    }
    if (llama_n_ctx(target) < (uint32_t) params.draft_tokens + 2) {
        fail(DW_ERR_UNSUPPORTED, "n_ctx is %u; %d draft tokens need at least %d", llama_n_ctx(target),
             params.draft_tokens, params.draft_tokens + 2);
    }
    return params;
}

} // namespace

engine::engine(llama_context * target, const llama_context_params & context_params, const dw_params & params) :
    params_(checked(target, params)),
    sequence_(target, params_, *this),
    costs_(sequence_.context().left().on_gpu() ? n_warmup_on_gpu : 1,
           /*shares_cores*/ !sequence_.context().left().on_gpu()),
    checkpoints_((size_t) params.checkpoint_bytes) {
    if (params.drafter != DW_DRAFTER_NONE) {
        sequence_.prepare_drafts(params.draft_tokens, params.tree_budget);
    }
    drafter_ = make_drafter(sequence_.context(), context_params, params);
    n_past_  = sequence_.end();
    stats_reset();
    const bool in_company = params.length == DW_LENGTH_AUTO || params.tree_budget > 0;
    if (in_company && drafter_ && params.drafter != DW_DRAFTER_NGRAM) {
        ngram_ = std::make_unique<ngram_drafter>();
    }
    if (params.length == DW_LENGTH_AUTO && drafter_) {
        if (params.curve) {
            costs_.set_curve(params.curve->draft_us, params.curve->verify_us);
        } else {
            measure();
        }
    }
    params_.drafter_path = nullptr; // the caller's pointers end here
    params_.curve        = nullptr;
}

// Rounds on tokens that mean nothing, for the cost curve.
void engine::measure() {
    if (llama_n_ctx(sequence_.target()) < (uint32_t) params_.draft_tokens + 16) {
        return;
    }
    const llama_token token = 0;
    eval(&token, 1, 0, false);
    measuring_ = true;
    load_schedule schedule(params_.draft_tokens, costs_.n_warmup());
    while (!schedule.is_done()) {
        const int64_t start_us = ggml_time_us();
        measure_round(token, schedule.n_tokens());
        if (schedule.add_round(ggml_time_us() - start_us)) {
            costs_.update_curve(/*use_minimum*/ true);
        }
    }
    measuring_ = false;
    reset();
    stats_reset();
}

void engine::measure_round(llama_token token, int32_t n_draft) {
    start(token);
    draft(n_draft, 0, 0);
    while (tree_.n_drafts() < n_draft) {
        tree_.add(tree_.n_drafts(), token, 0.0f);
    }
    verify();
    commit();
}

engine::~engine() {
    guard([this] {
        commit();
        return DW_OK;
    });
}

// Show the drafter what was kept. A drafter that fails costs drafts, never the request.
void engine::observe(const kept_rows & kept) {
    each_drafter([&](drafter & d) {
        try {
            d.observe(kept);
        } catch (const std::exception &) {
            d.reset();
        }
    });
}

// a draft was made from a token that may not come after all
void engine::drop_proposal() {
    if (proposed_) {
        each_drafter([&](drafter & d) { d.trim(n_past_); });
    }
    proposed_ = false;
}

void engine::start(llama_token last) {
    sequence_.require_tokens(&last, 1);
    require_known("a round");
    commit();
    require_whole("a round");
    drop_proposal();
    tree_       = token_tree(last);
    ahead_      = false;
    proposed_   = true;
    drafted_by_ = from_drafter;
}

int64_t engine::tree_bytes() const {
    return sequence_.context().trees() ? (int64_t) sequence_.context().trees()->bytes() : 0;
}

dw_stats engine::stats() const {
    dw_stats stats         = stats_;
    stats.n_exact_batches  = sequence_.context().n_exact_batches();
    stats.n_checkpoints    = checkpoints_.count();
    stats.checkpoint_bytes = (int64_t) checkpoints_.bytes();
    const int32_t limit    = sequence_.context().row_limit();
    stats.row_limit        = limit == INT32_MAX ? 0 : limit;
    stats.n_launches       = gpu_launches().all - launches_.all;
    stats.n_replays        = gpu_launches().replayed - launches_.replayed;
    return stats;
}

void engine::curve(dw_curve & out) {
    costs_.update_curve();
    costs_.get_curve(out.draft_us, out.verify_us);
}

void engine::set_top(int32_t n) {
    if (n < 0) {
        fail(DW_ERR_ARGUMENT, "%d tokens are enough to sample from; expected 0 (all) or more", n);
    }
    n_enough_ = n;
}

void engine::stats_reset() {
    stats_             = {};
    stats_.struct_size = sizeof(stats_);
    sequence_.context().reset_counters();
    launches_ = gpu_launches();
}

} // namespace draftwood
