// How a session is made, what it measures and counts: see session.h.

#include "round/session.h"

#include "round/load_schedule.h"

#include <algorithm>
#include <cmath>

namespace draftwood {

namespace {

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
    if (params.draft_vocab < 0 || (params.draft_vocab > 0 && params.draft_vocab < dw_n_top)) {
        fail(DW_ERR_ARGUMENT, "draft_vocab is %d; expected 0 (by the vocabulary) or at least %d tokens",
             params.draft_vocab, (int) dw_n_top);
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
    if (llama_n_ctx_seq(target) < (uint32_t) params.draft_tokens + 2) {
        fail(DW_ERR_UNSUPPORTED, "n_ctx is %u; %d draft tokens need at least %d", llama_n_ctx_seq(target),
             params.draft_tokens, params.draft_tokens + 2);
    }
    return params;
}

// Prepares for drafts before a drafter is made: this may throw failure.
target_context & prepared(sequence & target, const dw_params & params) {
    if (params.drafter != DW_DRAFTER_NONE) {
        target.prepare_drafts(params.draft_tokens, params.tree_budget);
        return target.context();
    }
    // llama_batch_allocr::split_equal asserts it
    const uint32_t n_rs_seq = llama_n_rs_seq(target.llama()), n_ubatch = llama_n_ubatch(target.llama());
    if (n_rs_seq > 0 && n_ubatch < n_rs_seq + 2) {
        fail(DW_ERR_UNSUPPORTED, "n_ubatch is %u; %u recurrent snapshots (n_rs_seq) need at least %u", n_ubatch,
             n_rs_seq, n_rs_seq + 2);
    }
    return target.context();
}

} // namespace

session::session(llama_context * target, const llama_context_params & context_params, const dw_params & params) :
    params_(checked(target, params)),
    checkpoints_((size_t) params.checkpoint_bytes),
    sequence_(target, params_, *this),
    drafting_(prepared(sequence_, params), context_params, params, stats_) {
    n_past_ = sequence_.end();
    stats_reset();
    if (drafting_.chooses()) {
        if (params.curve) {
            drafting_.costs().set_curve(params.curve->draft_us, params.curve->verify_us);
        } else if (sequence_.context().is_empty()) { // else times are learned from the text's own rounds
            try {
                measure();
            } catch (...) { // the caller's context is as empty as it was
                guard([this] {
                    reset();
                    return DW_OK;
                });
                throw;
            }
        }
    }
    params_.drafter_path = nullptr; // the caller's pointers end here
    params_.curve        = nullptr;
}

session::~session() {
    guard([this] {
        commit();
        return DW_OK;
    });
}

// Rounds on tokens that mean nothing, for the cost curve.
void session::measure() {
    if (llama_n_ctx_seq(sequence_.llama()) < (uint32_t) params_.draft_tokens + 16) {
        return;
    }
    const llama_token token = 0;
    eval(&token, 1, 0, false);
    load_schedule schedule(params_.draft_tokens, drafting_.costs().n_warmup());
    while (!schedule.is_done()) {
        const int64_t start_us = ggml_time_us();
        measure_round(token, schedule.n_tokens());
        if (schedule.add_round(ggml_time_us() - start_us)) {
            drafting_.costs().update_curve_at_load();
        }
    }
    reset();
    stats_reset();
}

void session::measure_round(llama_token token, int32_t n_draft) {
    begin_round(token);
    proposal & draft = round_.draft();
    drafting_.propose_alone(draft, n_past_, n_draft);
    while (draft.tree.n_drafts() < n_draft) {
        draft.tree.add(draft.tree.n_drafts(), token, 0.0f);
    }
    verify();
    commit();
}

dw_stats session::stats() const {
    dw_stats stats         = stats_;
    stats.n_exact_batches  = sequence_.context().n_exact_batches() - n_exact_before_;
    stats.n_checkpoints    = checkpoints_.count();
    stats.checkpoint_bytes = (int64_t) checkpoints_.bytes();
    stats.drafter_bytes    = budget().drafter.held;
    stats.graph_bytes      = budget().graphs.held;
    stats.tree_bytes       = budget().tree_state.held;
    const int32_t limit    = sequence_.context().row_limit();
    stats.row_limit        = limit == INT32_MAX ? 0 : limit;
    stats.draft_vocab      = drafting_.draft_vocab();
    stats.n_launches       = gpu_launches().all - launches_.all;
    stats.n_replays        = gpu_launches().replayed - launches_.replayed;
    stats.n_fused_parts    = sequence_.context().n_fused_parts();
    return stats;
}

void session::curve(dw_curve & out) {
    drafting_.costs().update_curve();
    drafting_.costs().settle_curve();
    drafting_.costs().get_curve(out.draft_us, out.verify_us);
}

void session::set_request(const dw_request_params & request) {
    if (!(request.temperature >= 0.0f && std::isfinite(request.temperature))) {
        fail(DW_ERR_ARGUMENT, "temperature is %g; expected 0 (greedy) or more", request.temperature);
    }
    if (request.n_top < 0) {
        fail(DW_ERR_ARGUMENT, "n_top is %d; expected 0 (all tokens) or more", request.n_top);
    }
    drafting_.set_temperature(request.temperature);
    n_enough_ = request.n_top;
}

void session::stats_reset() {
    stats_             = {};
    stats_.struct_size = sizeof(stats_);
    n_exact_before_    = sequence_.context().n_exact_batches(); // all engines of the context count there
    launches_          = gpu_launches();
}

} // namespace draftwood
