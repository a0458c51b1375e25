// MTP drafts that wait for no token: those whose tokens stay on the device, and those that begin behind a verify that
// still runs. See mtp.h.

#include "drafters/mtp.h"

#include <utility>
#include <vector>

namespace draftwood {

namespace {

// The last n hidden states of a decode, as rows of `states`, and the first value of each of n rows of best tokens, from
// row `at` of `tokens` on. On a GPU in one launch. top: nullptr without tokens.
void keep_rows(device_rows & states, device_rows & tokens, int32_t at, const result_rows & hidden,
               const ggml_tensor * top, int32_t n, row_copies copies) {
    const int64_t first = hidden.tensor ? hidden.tensor->ne[1] - n : 0;
    if (top && copies && hidden.tensor && states.lies_beside(hidden.tensor) && tokens.lies_beside(top)) {
        std::vector<row_piece> pieces{ states.piece(0, hidden.tensor, first, n) };
        for (int32_t i = 0; i < n; ++i) {
            pieces.push_back(tokens.piece(at + i, top, i, 1));
        }
        copies(tokens.backend(), pieces.data(), (int) pieces.size());
        return;
    }
    states.copy(0, hidden, first, n);
    for (int32_t i = 0; top && i < n; ++i) {
        tokens.copy(at + i, top, i, 1);
    }
}

} // namespace

mtp_drafter::begun_draft::begun_draft(ggml_backend_t backend, int64_t n_embd, int64_t n_rows) :
    best(backend, 1, n_rows),
    states(backend, n_embd, n_rows),
    drafted(backend, 1, n_rows),
    outputs(backend, n_embd, n_rows) {}

// The result has hidden states of all rows of the batch, or of the last n alone: these go to outputs. Of a draft ahead
// the best token is kept, too.
void mtp_drafter::keep_results(int32_t n) {
    results & newest = ctx_.newest_results();
    keep_rows(shared_->outputs, drafted_.rows(), n_ahead_, newest.hidden(),
              n_ahead_ >= 0 ? newest.device_top() : nullptr, n, ctx_.attached().copies);
}

// As draft_chain() without waiting for a token: each goes from its row's best straight into the next row, and its place
// in the tree holds the root's until settle(). Two graphs take turns, so that one's inputs can be written while the
// other runs. A draft that is begun has its first token already.
void mtp_drafter::draft_ahead(const draft_request & request, token_tree & tree) {
    const int32_t begun = begun_ ? std::exchange(begun_->row, -1) : -1;
    for (int32_t i = 0;; ++i) {
        const bool is_first = i == 0 && begun >= 0; // others may have decoded since
        if (!is_first && !ctx_.newest_results().has_top()) {
            fail(DW_ERR_MEMORY, "a graph of the MTP block found no memory for its best tokens");
        }
        tree.add(i, request.last, 0.0f);
        if (i + 1 >= request.depth) {
            break;
        }
        ctx_.batch().clear();
        add_row(request.last, request.pos + 1 + i, true);
        decode_request      next;
        const device_rows & tokens = is_first ? begun_->drafted : drafted_.rows();
        next.slot = drafter_context::slot(i % 2 == 0 ? graph_kind::ahead : graph_kind::ahead_other, seq_);
        next.feeds.push_back(tokens.feed(row_feed::token, 0, is_first ? begun : i, 1, shared_->block.embeddings));
        next.feeds.push_back(is_first ? hidden_feed(0, begun_->outputs, begun, 1)
                                      : hidden_feed(0, shared_->outputs, 0, 1));
        n_ahead_ = i + 1;
        if (!decode(next, 1)) {
            break;
        }
    }
    n_ahead_ = -1;
    if (begun >= 0) { // here, where the device has more to do meanwhile
        drafted_.take(begun_->drafted.tensor(), begun, 1);
    }
    drafted_.send(tree.n_drafts());
    n_fed_ = ctx_.end(seq_);
}

// whether a verify of n rows left its results where they can be copied from
bool mtp_drafter::begun_draft::takes(const ggml_tensor * top, const ggml_tensor * hidden, int32_t n) const {
    return top && hidden && top->ne[1] == n && hidden->ne[1] == n && n <= best.tensor()->ne[1] &&
           best.lies_beside(top) && states.lies_beside(hidden);
}

// The pairs of the verify's tokens, with the target's hidden states, replace those that were drafted.
bool mtp_drafter::begin_behind(llama_pos pos, int32_t n, bool greedy) {
    results &           target   = target_.newest_results();
    const ggml_tensor * top      = target.device_top();
    const bool          has_room = pos + 1 + n <= ctx_.n_positions() && ctx_.can_begin(seq_, n);
    const bool          is_fed   = queue_.size() == 0 && n_fed_ > pos; // all pairs up to the root's
    if (!greedy || !has_room || !is_fed || !begun_ || !begun_->takes(top, target.hidden().tensor, n)) {
        return false;
    }
    drop_cells_from(pos + 1);
    const ggml_backend_t reader = ctx_.newest_results().backend();
    target.wait_for(reader);
    keep_rows(begun_->states, begun_->best, 0, target.hidden(), top, n, ctx_.attached().copies);
    target.taken_by(reader);

    ctx_.batch().clear();
    for (int32_t i = 0; i < n; ++i) {
        add_row(0, pos + 1 + i, true);
    }
    decode_request rows;
    rows.slot = drafter_context::slot(graph_kind::begun, seq_);
    rows.feeds.push_back(begun_->best.feed(row_feed::token, 0, 0, n, shared_->block.embeddings));
    rows.feeds.push_back(hidden_feed(0, begun_->states, 0, n));
    begun_->pos          = pos;
    begun_->n            = n;
    results &     newest = ctx_.newest_results();
    const int32_t rc     = ctx_.try_to_decode(rows);
    if (rc != 0 || !newest.has_top()) {
        forget_begun();
        if (rc != 1) { // there is no memory; 1: no cells
            begun_.reset();
        }
        return false;
    }
    keep_rows(begun_->outputs, begun_->drafted, 0, newest.hidden(), newest.device_top(), n, ctx_.attached().copies);
    return true;
}

// The verify's tokens are known. Pairs stay up to the first token that was not its row's best. Returns whether all of
// them stay, and the row behind the last one: the next draft is begun.
bool mtp_drafter::take_begun(const kept_rows & kept) {
    if (!begun_ || begun_->n == 0 || kept.is_prompt || kept.pos != begun_->pos || kept.n > begun_->n ||
        !target_.newest_results().has_top()) {
        forget_begun();
        return false;
    }
    const auto best = [&](int32_t i) { return target_.newest_results().top(kept.rows[i]).tokens[0]; };
    int32_t    n    = 0;
    while (n < kept.n - 1 && (kept.scheduled || best(n) == kept.tokens[n + 1])) {
        ++n;
    }
    const bool whole = n == kept.n - 1;
    begun_->n        = 0;
    begun_->row      = whole ? n : -1;
    begun_->guessed  = best(n);
    begun_->any      = kept.scheduled;
    n_fed_           = kept.pos + 1 + n;
    if (!whole) { // else observe() removes what comes behind the row
        ctx_.remove_from(seq_, n_fed_);
    }
    return whole;
}

bool mtp_drafter::is_begun_for(const draft_request & request) {
    if (!begun_ || begun_->row < 0) {
        return false;
    }
    if (request.ahead && request.pos == n_fed_ && (begun_->any || request.last == begun_->guessed)) {
        return true;
    }
    forget_begun();
    return false;
}

// Removes the rows that wait for the verify's tokens, or the one that the next draft was to start from.
void mtp_drafter::forget_begun() {
    if (begun_ && (begun_->n > 0 || begun_->row >= 0)) {
        ctx_.remove_from(seq_, n_fed_);
        begun_->n   = 0;
        begun_->row = -1;
    }
}

} // namespace draftwood
