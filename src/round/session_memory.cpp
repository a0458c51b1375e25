// What a session does with the target's memory between rounds: prompts, going back, checkpoints, others who decode or
// load into it. See session.h.

#include "round/session.h"
#include "round/timer.h"

#include <algorithm>
#include <numeric>

namespace draftwood {

// somebody else is about to decode or to save: only accepted rows may be in the memory then
void session::on_flush(bool decodes) noexcept {
    guard([this] {
        commit();
        return DW_OK;
    });
    round_.drop_rows(); // the logits will be another decode's
    sequence_.unknown();
    if (decodes) {
        guard([this] {
            drop_proposal();
            return DW_OK;
        });
        round_.forget();
        checkpoints_.clear(); // the decode may replace tokens before them
    }
}

void session::on_replaced() noexcept {
    forget();
    checkpoints_.clear();
    sequence_.unknown();
}

// nothing of before counts: no open round, no draft, a drafter that starts anew
void session::forget() {
    round_.forget();
    drafting_.reset();
}

void session::require_kept(int32_t n_keep) const {
    const llama_pos end = settled_end();
    if (n_keep < 0 || n_keep > end) {
        fail(DW_ERR_ARGUMENT, "%d positions to keep; the context holds %d", n_keep, end);
    }
}

void session::eval(const llama_token * tokens, int32_t n_tokens, int32_t n_past, bool all_logits) {
    if (n_tokens < 1 || n_tokens > (int32_t) llama_n_ubatch(sequence_.llama())) {
        fail(DW_ERR_ARGUMENT, "%d tokens to evaluate; expected 1 to n_ubatch = %u", n_tokens,
             llama_n_ubatch(sequence_.llama()));
    }
    if (all_logits && n_tokens > max_outputs(sequence_.llama())) {
        fail(DW_ERR_ARGUMENT, "%d tokens with logits; expected at most n_outputs_max = %d", n_tokens,
             max_outputs(sequence_.llama()));
    }
    sequence_.require_tokens(tokens, n_tokens);
    require_known("an evaluation");
    place(n_past);
    drop_proposal();
    drafting_.costs().update_curve(); // on a CPU it stands still within a generation, unless it is far off

    timer t(stats_.t_eval_us);
    round_.drop_rows();
    decode(tokens, n_tokens, n_past, all_logits);

    n_past_ = n_past + n_tokens;
    gap_    = 0;
    stats_.n_prompt += n_tokens;
    round_.evaluated(tokens[n_tokens - 1], n_tokens - 1, n_past_ - 1);
    std::vector<int32_t> rows(n_tokens);
    std::iota(rows.begin(), rows.end(), 0);
    drafting_.observe({ tokens, rows.data(), n_tokens, n_past, /*is_prompt*/ true });
}

void session::decode(const llama_token * tokens, int32_t n_tokens, int32_t n_past, bool all_logits) {
    lost_ = true;
    try {
        sequence_.decode(tokens, n_tokens, n_past, all_logits);
        lost_ = false;
    } catch (const failure & e) {
        lost_ = !sequence_.context().intact();
        fail(e.code() == DW_ERR_MEMORY ? DW_ERR_DECODE : e.code(), "%s", e.what());
    }
}

// Cut to n_past, or leave a gap before it where images do: a multimodal handler decodes by itself and then goes on
// at a position that is further than the cells it filled.
void session::place(int32_t n_past) {
    const bool gap = sequence_.mrope() && n_past > n_past_ && n_past < (int32_t) llama_n_ctx_seq(sequence_.llama());
    if (!gap) {
        require_kept(n_past);
    }
    commit();
    if (!gap || n_past <= sequence_.end()) {
        trim(n_past);
        return;
    }
    round_.drop_rows();
    n_past_ = n_past;
    gap_    = n_past - sequence_.end();
    drafting_.trim(n_past);
}

// a raw llama_decode by others may have moved the context on; drafting over it would corrupt it
void session::require_whole(const char * what) const {
    if (moved()) {
        fail(DW_ERR_STATE, "%s at position %d, but the context holds %d positions; call dw_trim or dw_reset first",
             what, n_past_, sequence_.end());
    }
}

// after a decode or a commit that stopped half-way the content of the memory is unknown
void session::require_known(const char * what) const {
    if (lost_) {
        fail(DW_ERR_STATE, "%s after a decode that failed; the context's memory is unknown, call dw_reset", what);
    }
}

void session::trim(int32_t n_keep) {
    if (n_keep < 0) {
        fail(DW_ERR_ARGUMENT, "%d positions to keep; expected 0 or more", n_keep);
    }
    if (moved()) {
        checkpoints_.clear();
    }
    if (lost_ && n_keep > 0 && !checkpoints_.find(n_keep)) {
        fail(DW_ERR_UNSUPPORTED, "the context's memory is unknown after a decode that failed; reset and evaluate anew");
    }
    if (!lost_) {
        require_kept(n_keep);
    }
    close_round();
    if (!lost_ && n_keep == sequence_.end() && n_keep == n_past_) {
        return;
    }
    sequence_.context().drop_step();
    drop_proposal();
    if (n_keep == 0) {
        reset();
        return;
    }
    cut(n_keep);
    n_past_ = n_keep; // also when others moved the context on
    gap_    = 0;
    round_.drop_rows();
}

// the memory and the drafter, back to n_keep positions
void session::cut(int32_t n_keep) {
    const bool   behind = lost_ || n_keep < sequence_.end();
    const auto * saved  = behind && (lost_ || !sequence_.can_cut(n_keep)) ? checkpoints_.find(n_keep) : nullptr;
    if (saved) {
        try {
            changing([&] { sequence_.restore(saved->state.data(), saved->state.size(), n_keep); });
        } catch (...) {
            checkpoints_.clear(); // else the next request would go back to it again
            throw;
        }
    } else if (behind) {
        sequence_.cut(n_keep);
    }
    drafting_.trim(n_keep);
    if (saved) {
        drafting_.resume(n_keep, saved->drafter);
    }
    checkpoints_.drop_beyond(n_keep);
    stats_.n_restored += saved ? 1 : 0;
}

// Callers call it where a later request may begin to differ: at the end of what a chat's turns share. Nothing is kept
// if others decoded since, as for images: a checkpoint stands for the tokens before it, and theirs are not known.
void session::checkpoint() {
    require_known("a checkpoint");
    commit();
    if (!sequence_.recurrent() || n_past_ == 0 || moved() || checkpoints_.find(n_past_)) {
        return;
    }
    try {
        std::vector<float> mark = drafting_.mark(n_past_);
        if (checkpoints_.make_room(sequence_.state_bytes() + mark.size() * sizeof(float))) {
            checkpoints_.put({ n_past_, sequence_.save(), std::move(mark) });
        }
    } catch (const std::exception &) { // a later request evaluates more tokens; this one goes on
    }
}

// whether others changed the memory without a word
bool session::moved() const {
    return !round_.is_open() && !lost_ && sequence_.end() + gap_ != n_past_;
}

int32_t session::reach(int32_t n_keep) const {
    const llama_pos end = settled_end();
    if (!lost_ && (n_keep >= end || !sequence_.recurrent())) {
        return std::max(0, std::min(n_keep, (int32_t) end));
    }
    return moved() ? 0 : checkpoints_.reach(n_keep);
}

// A state that others kept, of a text that begins as this one: unlike a load that nobody announced, the drafter stays.
void session::restore(const uint8_t * state, size_t n_bytes, int32_t n_keep) {
    if (n_keep < 1) {
        fail(DW_ERR_ARGUMENT, "%d positions to restore; expected 1 or more", n_keep);
    }
    commit();
    drop_proposal();
    round_.drop_rows();
    changing([&] { sequence_.restore(state, n_bytes, n_keep); });
    drafting_.trim(n_keep);
    checkpoints_.drop_beyond(n_keep);
    n_past_ = n_keep;
    gap_    = 0;
}

void session::reset() {
    forget();
    checkpoints_.clear();
    n_past_ = 0;
    gap_    = 0;
    lost_   = false;
    sequence_.clear();
}

} // namespace draftwood
