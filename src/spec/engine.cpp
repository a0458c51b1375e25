// The speculative round: see engine.h and draftwood.h.

#include "engine.h"

#include "ngram.h"
#include "timer.h"

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
    if (params.draft_tokens < 1 || params.draft_tokens > DW_MAX_DRAFT) {
        fail(DW_ERR_ARGUMENT, "draft_tokens is %d; expected 1 to %d", params.draft_tokens, DW_MAX_DRAFT);
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
    sequence_(target, params.exact_rows),
    checkpoints_((size_t) params.checkpoint_bytes) {
    if (params.drafter != DW_DRAFTER_NONE) {
        sequence_.prepare_drafts(params.draft_tokens);
    }
    drafter_ = make_drafter(target, context_params, params);
    n_past_  = sequence_.end();
    stats_reset();
    sequence_.listen(on_flush, on_replaced, this);
    if (params.length == DW_LENGTH_AUTO && drafter_) {
        ngram_ = params.drafter == DW_DRAFTER_NGRAM ? nullptr : std::make_unique<ngram_drafter>();
        if (params.curve) {
            pace_.set(params.curve->draft_us, params.curve->verify_us);
        } else {
            measure();
        }
    }
    params_.drafter_path = nullptr; // the caller's pointers end here
    params_.curve        = nullptr;
}

// Rounds on tokens that mean nothing, for the cost curve: some sizes, after a first time that builds the graph. A slow
// model is not held up: past the budget one timed round must do, and only a plain step and the longest draft have one;
// requests refine the rest.
void engine::measure() {
    constexpr int64_t budget   = 300 * 1000; // microseconds
    const int32_t     longest  = params_.draft_tokens;
    const int64_t     start_us = ggml_time_us();
    if (llama_n_ctx(sequence_.target()) < (uint32_t) longest + 16) {
        return;
    }
    const llama_token token = 0;
    eval(&token, 1, 0, false);
    for (const int32_t n : { 0, longest, 1, 3, 7 }) {
        if (n > longest || (n != 0 && n != longest && ggml_time_us() - start_us > budget)) {
            continue;
        }
        for (int repeat = 0; repeat < 4; ++repeat) {
            start(token);
            draft(n);
            draft_.resize(n, token);
            verify();
            commit();
            if (repeat > 0 && ggml_time_us() - start_us > budget) {
                break;
            }
        }
        pace_.refine(/*least*/ true);
    }
    reset();
    stats_reset();
}

engine::~engine() {
    guard([this] {
        commit();
        return DW_OK;
    });
}

// Show the drafter what was kept. A drafter that fails costs drafts, never the request.
void engine::observe(const llama_token * tokens, int32_t n_tokens, llama_pos pos) {
    each_drafter([&](drafter & d) {
        try {
            d.observe(tokens, n_tokens, pos);
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
    last_ = last;
    draft_.clear();
    proposed_   = true;
    drafted_by_ = pace::asked;
}

int32_t engine::max_draft() const {
    return sequence_.can_draft() ? std::max(0, std::min(params_.draft_tokens, room() - 1)) : 0;
}

int32_t engine::propose(llama_token last, int32_t wanted) {
    start(last);
    const int32_t n_max = std::min(wanted, max_draft());
    if (drafter_ && n_max > 0) {
        if (params_.length == DW_LENGTH_AUTO) {
            draft_best(n_max);
        } else {
            draft(n_max);
        }
    }
    return (int32_t) draft_.size();
}

// with whom and as far as it pays; n-grams cost next to nothing, so they are looked up before the choice
void engine::draft_best(int32_t n_max) {
    std::vector<llama_token> found;
    if (ngram_) {
        ngram_->draft(last_, n_past_, n_max, 0.0f, found);
    }
    const pace::choice choice = pace_.choose({ n_max, (int32_t) found.size() });
    drafted_by_               = choice.by;
    if (choice.by == pace::ngram || choice.n == 0) {
        caught_up_ = false;
    }
    if (choice.by == pace::ngram) {
        found.resize(choice.n);
        draft_ = std::move(found);
        stats_.n_ngram_rounds++;
    } else {
        draft(choice.n);
    }
    stats_.n_paused_rounds += choice.n == 0 ? 1 : 0;
}

// let the drafter continue last_ by up to n tokens
void engine::draft(int32_t n) {
    if (n < 1) {
        return;
    }
    const int64_t start_us = ggml_time_us();
    bool          drafted  = false;
    try {
        drafted = drafter_->draft(last_, n_past_, n, params_.draft_p_min, draft_);
    } catch (const std::exception &) { // costs drafts, never the request
        drafter_->reset();
        draft_.clear();
    }
    const int64_t took = ggml_time_us() - start_us;
    stats_.t_draft_us += took;
    stats_.n_cold_rounds += drafted ? 0 : 1;
    if (drafted && caught_up_ && (int32_t) draft_.size() == n) {
        pace_.drafted(n, took);
    }
    caught_up_ = drafted;
}

void engine::propose_given(llama_token last, const llama_token * draft, int32_t n_draft) {
    if (n_draft < 0 || n_draft > params_.draft_tokens) {
        fail(DW_ERR_ARGUMENT, "a draft of %d tokens; expected 0 to draft_tokens = %d", n_draft, params_.draft_tokens);
    }
    sequence_.require_tokens(draft, n_draft);
    if (n_draft > 0) {
        sequence_.prepare_drafts(params_.draft_tokens);
    }
    start(last);
    draft_.assign(draft, draft + std::min(n_draft, max_draft()));
}

void engine::verify() {
    if (!proposed_) {
        fail(DW_ERR_STATE, "dw_verify without a dw_propose before it");
    }
    const int64_t start_us = ggml_time_us();
    proposed_              = false;
    walk_                  = {};
    row_batch & batch      = sequence_.batch();
    batch.clear();
    batch.add(last_, n_past_, true);
    for (size_t i = 0; i < draft_.size(); ++i) {
        batch.add(draft_[i], n_past_ + 1 + (llama_pos) i, true);
    }
    const int32_t n_rows = 1 + (int32_t) draft_.size();
    changing([&] { sequence_.verify(n_past_, n_rows); });
    llama_synchronize(sequence_.target()); // sampling waits for it anyway, and here its time is known
    verify_us_ = ggml_time_us() - start_us;
    stats_.t_verify_us += verify_us_;

    walk_ = { 0, n_rows, 0, n_past_, /*alive*/ true, /*open*/ true };
    n_past_ += 1; // the root is part of the text already
    stats_.n_rounds++;
    stats_.n_drafted += (int64_t) draft_.size();
    for (size_t i = 0; i < draft_.size(); ++i) {
        stats_.drafted_at[i]++;
    }
}

bool engine::row(int32_t & row, int32_t & n_past) const {
    if (!walk_.alive) {
        return false;
    }
    row    = walk_.first_row + walk_.n_sampled;
    n_past = walk_.pos + walk_.n_sampled + 1;
    return true;
}

llama_token engine::next(llama_sampler * sampler) {
    if (!walk_.alive) {
        fail(DW_ERR_STATE, "dw_next without a row to sample; call dw_propose and dw_verify, or dw_eval");
    }
    timer         t(stats_.t_sample_us);
    const int32_t i      = walk_.n_sampled;
    const int32_t n_past = n_past_;
    // taken before it is sampled: a logits processor that saves the state ends the round through on_flush
    walk_.n_sampled = i + 1;
    n_past_         = walk_.pos + i + 1;
    llama_token token;
    try {
        token = llama_sampler_sample(sampler, sequence_.target(), walk_.first_row + i);
    } catch (...) {
        if (walk_.alive) {
            walk_.n_sampled = i;
            n_past_         = n_past;
        }
        throw;
    }
    walk_.alive = walk_.alive && walk_.n_sampled < walk_.n_rows && token == draft_[i];
    stats_.n_emitted++;
    if (walk_.alive) {
        stats_.n_accepted++;
        stats_.accepted_at[i]++;
    }
    return token;
}

void engine::commit() {
    if (!walk_.open) {
        return;
    }
    const int64_t start_us = ggml_time_us();
    // the root stays even if its row was never sampled: its token was emitted before
    const int32_t n_kept   = std::max(walk_.n_sampled, 1);
    const int32_t n_judged = walk_.alive ? n_kept - 1 : walk_.n_rows - 1; // what was not sampled was not refused
    pace_.walked(drafted_by_, n_judged, n_kept - 1);
    walk_.open  = false;
    walk_.alive = false;

    bool whole = false;
    changing([&] { whole = sequence_.keep(walk_.pos, walk_.n_rows, n_kept); });
    if (!whole) { // somebody cleared or replaced the memory: the round went with it
        forget();
        checkpoints_.clear();
        n_past_ = sequence_.end();
        return;
    }
    n_past_ = walk_.pos + n_kept;
    std::vector<llama_token> kept(1, last_);
    kept.insert(kept.end(), draft_.begin(), draft_.begin() + (n_kept - 1));
    observe(kept.data(), n_kept, walk_.pos);
    const int64_t took = ggml_time_us() - start_us;
    stats_.t_commit_us += took;
    pace_.verified(walk_.n_rows, verify_us_ + took);
}

void engine::rewind() {
    if (walk_.open || walk_.n_sampled < 1 || n_past_ != walk_.pos + walk_.n_sampled || sequence_.end() != n_past_) {
        fail(DW_ERR_STATE, "no logits of this engine's last decode stand for position %d; evaluate a token first",
             n_past_);
    }
    walk_.n_sampled--;
    walk_.n_rows = walk_.n_sampled + 1; // the rows behind it are gone
    walk_.alive  = true;
}

dw_stats engine::stats() const {
    dw_stats stats         = stats_;
    stats.n_exact_batches  = sequence_.n_exact_batches();
    stats.n_checkpoints    = checkpoints_.count();
    stats.checkpoint_bytes = (int64_t) checkpoints_.bytes();
    return stats;
}

void engine::curve(dw_curve & out) {
    pace_.refine();
    pace_.get(out.draft_us, out.verify_us);
}

void engine::stats_reset() {
    stats_             = {};
    stats_.struct_size = sizeof(stats_);
    sequence_.reset_counters();
}

} // namespace draftwood
