// MTP drafting: see mtp.h.

#include "drafters/mtp.h"

#include "llama/facts.h"

#include <algorithm>
#include <cmath>

namespace draftwood {

namespace {

constexpr int32_t n_waiting_max     = 256; // pairs that may wait for a draft, which in a pause may never come
constexpr int32_t n_waiting_if_sure = 64;  // the same if it comes for certain: a prompt's pairs are the prompt's time

// of a decode: a level of a tree, or a row of each sequence
int32_t n_outputs(const llama_context * target) {
    return std::max(mtp_drafter::widest, (int32_t) llama_n_seq_max(target));
}

llama_context * make_context(llama_context * target, llama_context_params params) {
    params               = drafter_context::params_for(target, params);
    params.ctx_type      = LLAMA_CONTEXT_TYPE_MTP;
    params.n_outputs_max = n_outputs(target);

    llama_context * ctx = llama_init_from_model(const_cast<llama_model *>(llama_get_model(target)), params);
    if (!ctx) {
        fail(DW_ERR_MEMORY, "no context for the MTP block could be made for n_ctx = %u: is there enough memory?",
             params.n_ctx);
    }
    return ctx;
}

// Rows that are thrown away cost a card little, unless experts that only they choose are copied to it.
bool wasted_rows_are_cheap(target_context & target) {
    return !target.newest_results().on_gpu() || experts_are_on_devices(llama_get_model(target.get()));
}

} // namespace

mtp_context::mtp_context(target_context & target, const llama_context_params & context_params,
                         const dw_params & params) :
    block(mtp_block_of(llama_get_model(target.get()))),
    ctx(make_context(target.get(), context_params), block.head, head_reads::each_token, params,
        target.attached().model),
    ahead(drafts_ahead(ctx.attached(), target.attached(), block.head.weights,
                       { block.projection, block.embeddings, token_embeddings(llama_get_model(target.get())) })),
    outputs(ctx.newest_results().backend(), llama_model_n_embd_out(llama_get_model(target.get())),
            n_outputs(target.get())) {
    ctx.keep_hidden();
    ctx.skip_unused();
}

mtp_drafter::mtp_drafter(target_context & target, const llama_context_params & context_params,
                         const dw_params & params) :
    target_(target),
    shared_(target.shared<mtp_context>(drafter_key("mtp", params),
                                       [&] { return std::make_shared<mtp_context>(target, context_params, params); })),
    ctx_(shared_->ctx),
    seq_(params.seq_id),
    n_embd_(llama_model_n_embd_out(llama_get_model(target.get()))),
    n_rows_max_((int32_t) llama_n_ubatch(ctx_.get())),
    most_waiting_(std::min(n_rows_max_, params.length == DW_LENGTH_AUTO ? n_waiting_max : n_waiting_if_sure)),
    beams_(seq_, n_kv_cells(ctx_.get())),
    states_(target.newest_results(), target.attached().copies, ctx_.newest_results().backend(), n_embd_,
            2 * (n_rows_max_ + n_waiting_max)),
    drafted_(ctx_.newest_results().backend(), ctx_.attached().copies),
    nothing_(n_embd_) {
    if (params.begin_drafts && shared_->ahead && wasted_rows_are_cheap(target)) {
        begun_.emplace(ctx_.newest_results().backend(), n_embd_, n_outputs(target.get()));
    }
    ctx_.remove_from(seq_, 0); // cells of an earlier drafter of this sequence
    target.attached().tap_hidden(true);
}

mtp_drafter::~mtp_drafter() {
    ctx_.remove_from(seq_, 0); // in a unified cache the others need the cells
    target_.attached().tap_hidden(false);
}

// Returns the row where the hidden state before the first of tokens i32[n] is to wait, the others' behind it.
int32_t mtp_drafter::push(const llama_token * tokens, int32_t n, llama_pos pos) {
    if (pos != queue_.pos + queue_.size()) { // after a gap: the queue is one run of positions
        catch_up();
        queue_.pos = pos;
    }
    const int32_t row = queue_.first + queue_.size();
    queue_.tokens.insert(queue_.tokens.end(), tokens, tokens + n);
    return row;
}

// The pairs that are not fed yet. One whose hidden state is unknown (position 0, a gap) is skipped.
void mtp_drafter::push_kept(const kept_rows & kept) {
    int32_t i = std::max(0, n_fed_ - kept.pos);
    if (i == 0) {
        if (kept.pos > 0 && hidden_pos_ == kept.pos - 1) {
            states_.push_newest(push(kept.tokens, 1, kept.pos));
        }
        i = 1;
    }
    while (i < kept.n) {
        const int32_t row = kept.rows[i - 1];
        int32_t       n   = 1; // rows that follow each other
        while (i + n < kept.n && kept.rows[i - 1 + n] == row + n) {
            ++n;
        }
        states_.keep(push(kept.tokens + i, n, kept.pos + i), row, n);
        i += n;
    }
}

void mtp_drafter::observe(const kept_rows & kept) {
    const bool is_begun = take_begun(kept); // before its results go
    ctx_.see(kept.tokens, kept.n);
    if (!beams_.empty()) {
        n_fed_ += beams_.keep(ctx_.get(), kept.tokens + 1, kept.n - 1);
        beams_.clear();
    }
    // pairs of rejected drafts go; those of accepted ones stay: as they were drafted, or as begin_behind() left them
    drop_cells_from(kept.pos + kept.n + (is_begun ? 1 : 0));
    states_.begin();
    push_kept(kept);
    states_.keep_newest(kept.rows[kept.n - 1]);
    states_.end();
    hidden_pos_ = kept.pos + kept.n - 1;

    // a long prompt is fed at once; what a round accepted waits for the next draft
    while (queue_.size() > most_waiting_) {
        feed(std::min(queue_.size(), n_rows_max_), /*output*/ false);
    }
}

void mtp_drafter::add_row(llama_token token, llama_pos pos, bool output) {
    ctx_.batch().add(token, pos, output, seq_, nothing_.data(), n_embd_);
}

// rows [to, to + n) of a decode have these hidden states
row_feed mtp_drafter::hidden_feed(int32_t to, const device_rows & from, int64_t row, int32_t n) const {
    return from.feed(row_feed::hidden, to, row, n, shared_->block.hidden_norm);
}

// Decode the batch. Results of its last n rows, those with an output, are kept.
bool mtp_drafter::decode(const decode_request & request, int32_t n) {
    const int32_t rc = ctx_.decode(request);
    if (rc == 0 && n > 0) {
        keep_results(n);
    }
    return rc == 0;
}

// Decode the first n queued pairs, the last one with or without an output.
void mtp_drafter::feed(int32_t n, bool output) {
    ctx_.batch().clear();
    for (int32_t i = 0; i < n; ++i) {
        add_row(queue_.tokens[i], queue_.pos + i, output && i == n - 1);
    }
    decode_request request;
    // without outputs all take the context's own graph
    request.slot = output ? drafter_context::slot(n > 1 ? graph_kind::pairs : graph_kind::rows, seq_) : 0;
    states_.reach();
    request.feeds.push_back(hidden_feed(0, states_.waiting(), queue_.first, n));
    if (!decode(request, output ? 1 : 0)) {
        fail(DW_ERR_DECODE, "llama_decode failed in the MTP block at positions %d..%d", queue_.pos, queue_.pos + n - 1);
    }
    fed(n);
}

// The first n queued pairs are in the KV cache.
void mtp_drafter::fed(int32_t n) {
    queue_.tokens.erase(queue_.tokens.begin(), queue_.tokens.begin() + n);
    queue_.first += n;
    queue_.pos += n;
    n_fed_ = queue_.pos;
    if (queue_.first >= queue_.size()) { // what is left fits in front of where it lies
        if (queue_.size() > 0) {
            states_.move(0, queue_.first, queue_.size());
        }
        queue_.first = 0;
    }
}

// Feed all queued pairs. Only the last one needs logits. Of the others keys and values are needed, and a decode without
// outputs computes nothing else. Two pairs, as accepted drafts leave them, go in one decode. Its last hidden
// state is read where it was computed: to the host a masked context copies the first rows of its hidden states, not
// those with an output (llama-context.cpp, decode).
void mtp_drafter::catch_up() {
    const int32_t n_last = queue_.size() == 2 && n_rows_max_ >= 2 && ctx_.newest_results().stay() ? 2 : 1;
    while (queue_.size() > n_last) {
        feed(std::min(queue_.size() - n_last, n_rows_max_), /*output*/ false);
    }
    if (queue_.size() > 0) {
        feed(n_last, /*output*/ true);
    }
}

bool mtp_drafter::is_ready(const draft_request & request) const {
    return request.pos > 0 && hidden_pos_ == request.pos - 1;
}

// the pair that the drafts go on from, behind those that wait
void mtp_drafter::push_root(const draft_request & request) {
    forget_begun();
    if (n_fed_ > request.pos || !beams_.empty()) { // a draft was made from this token already, and no round followed
        drop_cells_from(request.pos);
    }
    states_.push_newest(push(&request.last, 1, request.pos));
}

draft_result mtp_drafter::draft(const draft_request & request, token_tree & tree) {
    if (!is_ready(request)) {
        return draft_result::cold;
    }
    if (is_begun_for(request)) {
        draft_ahead(request, tree);
        return draft_result::begun;
    }
    push_root(request);
    n_ahead_ = request.ahead ? 0 : -1;
    catch_up();
    if (request.ahead) {
        draft_ahead(request, tree);
    } else if (request.budget > 0) {
        draft_tree(request, tree);
    } else {
        draft_chain(request, tree);
    }
    return draft_result::drafted;
}

void mtp_drafter::draft_chain(const draft_request & request, token_tree & tree) {
    float path = 1.0f;
    for (int32_t i = 0; i < request.depth; ++i) {
        const likeliest best = ctx_.best(-1, path, request.p_min);
        if (best.path < request.p_min) {
            break;
        }
        path = best.path;
        tree.add(i, best.token, std::log(path));
        if (i + 1 == request.depth) {
            break;
        }
        ctx_.batch().clear();
        add_row(best.token, request.pos + 1 + i, true);
        decode_request next;
        next.slot = drafter_context::slot(graph_kind::rows, seq_);
        next.feeds.push_back(hidden_feed(0, shared_->outputs, 0, 1));
        if (!decode(next, 1)) {
            break; // the context's end: what is drafted so far stands
        }
    }
    n_fed_ = ctx_.end(seq_); // the drafts' pairs stay: see observe
}

void mtp_drafter::drop_cells_from(llama_pos pos) {
    if (pos <= n_fed_) {
        beams_.clear(); // their rows lie from n_fed_ on: all of them go
    }
    ctx_.remove_from(seq_, pos);
    n_fed_ = std::min(n_fed_, pos);
}

void mtp_drafter::trim(llama_pos n_keep) {
    forget_begun();
    while (queue_.size() > 0 && queue_.pos + queue_.size() > n_keep) {
        queue_.tokens.pop_back();
    }
    drop_cells_from(n_keep);
    if (hidden_pos_ != n_keep - 1) {
        hidden_pos_ = -1;
    }
}

std::vector<float> mtp_drafter::mark(llama_pos pos) const {
    return hidden_pos_ == pos - 1 ? states_.newest() : std::vector<float>{};
}

void mtp_drafter::resume(llama_pos pos, const std::vector<float> & mark) {
    if (!mark.empty()) {
        states_.set_newest(mark.data());
        hidden_pos_ = pos - 1;
    }
}

llama_context * mtp_drafter::memory() {
    forget_begun();
    while (queue_.size() > 0) {
        feed(std::min(queue_.size(), n_rows_max_), /*output*/ false);
    }
    return ctx_.get();
}

void mtp_drafter::reset() {
    forget_begun();
    ctx_.remove_from(seq_, 0);
    beams_.clear();
    states_.drop();
    queue_      = {};
    n_fed_      = 0;
    hidden_pos_ = -1;
    n_ahead_    = -1;
}

} // namespace draftwood
