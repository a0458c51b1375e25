// The calls of a round: propose, verify, next, commit. See session.h.

#include "round/sampling.h"
#include "round/session.h"
#include "round/timer.h"
#include "round/verify_batch.h"
#include "tree/build.h"

#include <algorithm>

namespace draftwood {

int32_t session::positions_left() const {
    return (int32_t) llama_n_ctx_seq(sequence_.llama()) - n_past_;
}

// An image takes more cells than positions, other sequences may share the cache, an open round holds some. A step that
// is queued goes before others are decoded.
int32_t session::room() const {
    const target_context & context  = sequence_.context();
    const bool             has_step = context.has_step() && (has_unified_kv(context.get()) || sequence_.has_step());
    return std::min(positions_left(), context.free_cells(sequence_.id()) + (has_step ? 1 : 0));
}

int32_t session::max_draft(int32_t n_together) const {
    const int32_t n_rows =
        std::min({ room(), max_outputs(sequence_.llama()) / n_together, sequence_.context().row_limit(n_together) });
    return sequence_.can_draft() ? std::max(0, std::min(params_.draft_tokens, n_rows - 1)) : 0;
}

// every row takes a cell, and the token behind the last one must have a position
int32_t session::max_nodes(int32_t n_together) const {
    const int32_t budget =
        std::min({ params_.tree_budget, room(), (int32_t) llama_n_ubatch(sequence_.llama()),
                   max_outputs(sequence_.llama()) / n_together, sequence_.context().row_limit(n_together) });
    return sequence_.can_draft() && sequence_.tree_refusal().empty() ? std::max(0, budget) : 0;
}

draft_limits session::limits(int32_t wanted, int32_t n_together) const {
    return { n_past_, std::min(wanted, max_draft(n_together)), max_nodes(n_together) };
}

// the draft was made from a token that may not be the next one
void session::drop_proposal() {
    if (round_.is_proposed()) {
        drafting_.trim(n_past_);
        round_.drop_proposal();
    }
}

void session::begin_round(llama_token last) {
    sequence_.require_tokens(&last, 1);
    require_known("a round");
    close_round();
    require_whole("a round");
    drop_proposal();
    round_.propose(last);
    scheduled_ = false;
}

int32_t session::propose(llama_token last, int32_t wanted) {
    begin_round(last);
    drafting_.propose(round_.draft(), limits(wanted, /*n_together*/ 1));
    return tree().n_drafts();
}

void session::propose_given(llama_token last, const llama_token * draft, int32_t n_draft) {
    if (n_draft < 0 || n_draft > params_.draft_tokens) {
        fail(DW_ERR_ARGUMENT, "a draft of %d tokens; expected 0 to draft_tokens = %d", n_draft, params_.draft_tokens);
    }
    sequence_.require_tokens(draft, n_draft);
    if (n_draft > 0) {
        sequence_.prepare_drafts(params_.draft_tokens, params_.tree_budget);
    }
    begin_round(last);
    for (int32_t i = 0; i < std::min(n_draft, max_draft(/*n_together*/ 1)); ++i) {
        round_.draft().tree.add(i, draft[i], 0.0f);
    }
}

void session::propose_tree(const token_tree & tree) {
    if (tree.size() > params_.tree_budget) {
        fail(DW_ERR_ARGUMENT, "a tree of %d nodes; expected 1 to tree_budget = %d", tree.size(), params_.tree_budget);
    }
    sequence_.require_tokens(tree.tokens.data(), tree.size());
    sequence_.prepare_drafts(params_.draft_tokens, params_.tree_budget);
    if (!sequence_.tree_refusal().empty()) {
        fail(DW_ERR_UNSUPPORTED, "no draft trees here: %s", sequence_.tree_refusal().c_str());
    }
    const auto require_room = [&](int32_t left) {
        if (tree.size() > left) {
            fail(DW_ERR_CONTEXT, "a tree of %d nodes at position %d of a context of %u tokens", tree.size(), n_past_,
                 llama_n_ctx_seq(sequence_.llama()));
        }
    };
    require_room(positions_left());
    begin_round(tree.tokens[0]);
    require_room(room());
    if (sequence_.can_draft()) { // else a plain step makes the state our own
        round_.draft().tree = tree;
    }
}

void session::verify() {
    verify_batch({ this }).run();
}

void session::drop_stale_draft() {
    if (!sequence_.can_draft()) {
        shorten_draft(1);
    }
}

void session::shorten_draft(int32_t n_nodes) {
    proposal & draft = round_.draft();
    if (n_nodes == 1) {
        draft.tree   = token_tree(draft.tree.tokens[0]);
        draft.tokens = tokens_at::host;
        return;
    }
    drafting_.settle(draft);
    if (draft.tree.size() > n_nodes) {
        draft.tree = select(draft.tree, n_nodes, draft.tree.is_chain() ? n_nodes - 1 : 0);
    }
}

void session::verify_begins() {
    round_.verify_begins();
    lost_ = true;
}

void session::feed_draft(decode_request & request, int32_t n_rows, bool alone) {
    drafting_.feed(round_.draft(), request, n_rows, alone);
}

void session::verify_failed(bool intact, bool again) {
    lost_ = !intact;
    sequence_.unknown();
    if (again) {
        round_.verify_again();
    } else if (intact) {
        drafting_.trim(n_past_); // the draft is no longer what comes next
    }
}

void session::verified(const verify_result & result) {
    const proposal & draft = round_.draft();
    sequence_.verified(n_past_, result.n_rows, result.committer);
    lost_      = false;
    int64_t us = result.own_us;
    if (draft.tokens == tokens_at::verify) {
        us = result.is_alone ? drafting_.verify_time(draft) : 0;
        stats_.n_ahead_rounds++;
    }
    n_dropped_seen_ = stats_.n_dropped_steps;
    round_.verified(result.first_row, result.n_rows, n_past_, us);
    n_past_ += 1; // the root is part of the text already
    stats_.t_verify_us += result.batch_us;
    stats_.n_rounds++;
    stats_.n_drafted += draft.tree.n_drafts();
    stats_.n_tree_rounds += draft.tree.is_chain() ? 0 : 1;
    stats_.n_padding += result.n_rows - draft.tree.size();
    stats_.n_step_threads += sequence_.context().on_step_threads() ? 1 : 0;
    stats_.n_shared_rounds += sequence_.context().short_of_memory() || drafting_.short_of_memory() ? 1 : 0;
    for (int32_t depth = 0; depth < draft.tree.height(); ++depth) {
        stats_.drafted_at[depth]++;
    }
}

bool session::row(int32_t & row, int32_t & n_past) const {
    if (!round_.has_row()) {
        return false;
    }
    row    = round_.row();
    n_past = round_.n_past();
    return true;
}

template <typename F> llama_token session::walk_on(const char * what, F choose) {
    if (!round_.has_row()) {
        fail(DW_ERR_STATE, "%s without a row to sample; call dw_propose and dw_verify, or dw_eval", what);
    }
    timer t(stats_.t_sample_us);
    drafting_.settle(round_.draft());
    const int32_t row = round_.row(), node = round_.node(), depth = round_.n_sampled(), before = n_past_;
    n_past_ = round_.n_past();
    round_.take_row();
    llama_token token;
    try {
        token = choose(row, node);
    } catch (...) {
        if (round_.has_row()) { // else a logits processor saved the state, and with it the round ended
            round_.put_row_back();
            n_past_ = before;
        }
        throw;
    }
    const bool goes_on = round_.step(token);
    stats_.n_emitted++;
    if (goes_on) {
        stats_.n_accepted++;
        stats_.accepted_at[depth]++;
    }
    return token;
}

llama_token session::next(llama_sampler * sampler) {
    return walk_on("dw_next", [&](int32_t row, int32_t) { return sample(sampler, row); });
}

void session::took(llama_token token, bool scheduled) {
    sequence_.require_tokens(&token, 1);
    walk_on("dw_took", [&](int32_t, int32_t) { return token; });
    scheduled_ = scheduled;
}

llama_token session::next_scheduled(llama_sampler * sampler, bool accept) {
    scheduled_ = true;
    return walk_on("dw_next", [&](int32_t row, int32_t node) {
        const llama_token sampled = sample(sampler, row);
        const int32_t     n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(sequence_.llama())));
        return scheduled_token(tree(), node, accept && round_.is_open(), sampled, n_vocab);
    });
}

llama_token session::sample(llama_sampler * sampler, int32_t row) {
    bool              all_logits = false;
    const llama_token token      = sample_row(sampler, sequence_.context(), row, n_enough_, all_logits);
    stats_.n_logits_rows += all_logits ? 1 : 0;
    return token;
}

bool session::last_row(int32_t & row) const {
    if (!round_.can_rewind() || n_past_ != round_.pos() + round_.n_sampled() || sequence_.end() != n_past_) {
        return false;
    }
    row = round_.last_row();
    return true;
}

void session::rewind() {
    if (int32_t row; !last_row(row)) {
        fail(DW_ERR_STATE, "no logits of this engine's last decode stand for position %d; evaluate a token first",
             n_past_);
    }
    round_.rewind();
}

// Repeated rows change nothing: the state is only read, and cells and factors get the values that they have.
double session::replay(int32_t n_times) {
    if (!round_.is_open() || round_.n_rows() < 2 || n_times < 1 || !tree_refusal().empty()) {
        fail(DW_ERR_STATE, "%d replays; expected one or more, of a verify of two rows or more whose round is open",
             n_times);
    }
    return sequence_.context().replay(n_times);
}

void session::commit() {
    close_round();
    sequence_.context().drop_step();
    n_dropped_seen_ = stats_.n_dropped_steps;
}

void session::close_round() {
    if (!round_.is_open()) {
        return;
    }
    const int64_t              start_us = ggml_time_us();
    const std::vector<int32_t> path     = round_.kept_path();
    drafting_.learn(round_.draft(), path, round_.state() == round_state::ended);
    round_.close();
    drafting_.settle(round_.draft());

    bool whole = false;
    changing([&] { whole = sequence_.keep(tree(), round_.pos(), path); });
    if (!whole) {
        lose_round();
        return;
    }
    n_past_ = round_.pos() + (int32_t) path.size();
    std::vector<llama_token> kept;
    std::vector<int32_t>     rows;
    for (const int32_t node : path) {
        kept.push_back(tree().tokens[node]);
        rows.push_back(round_.first_row() + node);
    }
    const kept_rows all{
        kept.data(), rows.data(), (int32_t) path.size(), round_.pos(), /*is_prompt*/ false, scheduled_
    };
    drafting_.observe(all);
    sequence_.context().attached().model->accepted(
        { sequence_.llama(), sequence_.id(), all.tokens, all.rows, all.n, all.pos });
    const int64_t took = ggml_time_us() - start_us;
    stats_.t_commit_us += took;
    if (round_.verify_us() == 0 && round_.n_rows() > 1) { // together with others'
        drafting_.together().add_commit((double) took);
    }
    const int64_t host_us = took_step_ ? 0 : took; // a queued step's time has what the host did meanwhile
    drafting_.add_round_time(round_.draft(), round_.n_rows(),
                             round_.verify_us() > 0 ? round_.verify_us() + host_us : 0);
}

// Somebody cleared the memory, and the round went with it; or changed it, and nobody knows what is left.
void session::lose_round() {
    sequence_.context().drop_step();
    lost_ = sequence_.end() > round_.pos();
    forget();
    checkpoints_.clear();
    n_past_ = sequence_.end();
    gap_    = 0;
}

} // namespace draftwood
