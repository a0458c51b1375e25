// Decoding into the target's sequence, and going back: see sequence.h.

#include "sequence.h"

#include "llama-model.h"

#include <algorithm>

namespace draftwood {

namespace {

bool is_recurrent(const llama_context * ctx) {
    const llama_model * model = llama_get_model(ctx);
    return llama_model_is_hybrid(model) || llama_model_is_recurrent(model);
}

bool uses_mrope(const llama_context * ctx) {
    const llama_rope_type type = llama_model_rope_type(llama_get_model(ctx));
    return type == LLAMA_ROPE_TYPE_MROPE || type == LLAMA_ROPE_TYPE_IMROPE;
}

// true while it lives
class scope_of {
  public:
    explicit scope_of(bool & flag) :
        flag_(flag) {
        flag_ = true;
    }
    ~scope_of() { flag_ = false; }

  private:
    bool & flag_;
};

} // namespace

sequence::sequence(llama_context * target, int32_t exact_rows) :
    target_(target),
    recurrent_(is_recurrent(target)),
    mrope_(uses_mrope(target)),
    graphs_(target),
    batch_(target) {
    if (dw_state_of(target)) {
        fail(DW_ERR_UNSUPPORTED, "this llama_context has an engine already; free that one first");
    }
    state_.exact_rows   = exact_rows;
    state_.graphs       = &graphs_;
    dw_state_of(target) = &state_;
}

sequence::~sequence() {
    dw_state_of(target_) = nullptr;
    dw_use_stock_kernels(target_);
}

void sequence::listen(void (*flush)(void *, bool) noexcept, void (*replaced)(void *) noexcept, void * user) {
    state_.flush    = flush;
    state_.replaced = replaced;
    state_.user     = user;
}

void sequence::require_tokens(const llama_token * tokens, int32_t n_tokens) const {
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(target_)));
    for (int32_t i = 0; i < n_tokens; ++i) {
        if (tokens[i] < 0 || tokens[i] >= n_vocab) {
            fail(DW_ERR_ARGUMENT, "token %d; expected 0 to %d", tokens[i], n_vocab - 1);
        }
    }
}

void sequence::decode(llama_pos pos, int32_t n_tokens) {
    decoded_ = {};
    undone_  = false;

    // an exception is a failed decode too: the hooks must hear of other decodes again
    int32_t     rc = -3;
    std::string why;
    try {
        const scope_of work(at_work_);
        rc = batch_.decode();
    } catch (const std::exception & e) {
        why = e.what();
    }
    state_.verify = nullptr;
    state_.mask   = nullptr;

    if (rc == 1) {
        fail(DW_ERR_CONTEXT, "llama_decode returned 1: no room for %d tokens at position %d of a context of %u tokens",
             n_tokens, pos, llama_n_ctx(target_));
    }
    if (rc != 0) {
        fail(DW_ERR_DECODE, "llama_decode returned %d for %d tokens at position %d; expected 0 %s", rc, n_tokens, pos,
             why.c_str());
    }
    decoded_ = { pos, n_tokens, false };
}

void sequence::prepare_drafts(int32_t draft_tokens, int32_t tree_budget) {
    const uint32_t n_rs_seq = llama_n_rs_seq(target_);
    // a verify is one ubatch; with snapshots llama_batch_allocr::split_equal asserts n_ubatch > n_rs_seq + 1
    const int32_t n_rows = std::max({ draft_tokens + 1, tree_budget, n_rs_seq > 0 ? (int32_t) n_rs_seq + 2 : 0 });
    if (llama_n_ubatch(target_) < (uint32_t) n_rows) {
        const std::string trees = tree_budget > 1 ? " in trees of " + std::to_string(tree_budget) : "";
        fail(DW_ERR_UNSUPPORTED, "n_ubatch is %u; %d draft tokens%s need at least %d", llama_n_ubatch(target_),
             draft_tokens, trees.c_str(), n_rows);
    }
    if (tree_) {
        return;
    }
    if (recurrent_ && n_rs_seq >= (uint32_t) draft_tokens) {
        tree_refusal_ = "the context keeps snapshots of its recurrent layers (n_rs_seq)";
    } else {
        tree_refusal_.clear();
        tree_ = tree_state::make(target_, std::max(n_rows, bucket(tree_budget)), tree_refusal_);
    }
    if (recurrent_ && !tree_ && n_rs_seq < (uint32_t) draft_tokens) {
        fail(
            DW_ERR_UNSUPPORTED,
            "the context keeps %u recurrent snapshots, draft_tokens is %d, and no verify can do without (%s); expected "
            "n_rs_seq >= draft_tokens",
            llama_n_rs_seq(target_), draft_tokens, tree_refusal_.c_str());
    }
}

int32_t sequence::rows_of(const token_tree & tree, int32_t room) const {
    const int32_t n_rows = tree.is_chain() ? tree.size() : bucket(tree.size());
    return tree_ && n_rows <= std::min({ room, (int32_t) llama_n_ubatch(target_), tree_->max_nodes() }) ? n_rows
                                                                                                        : tree.size();
}

void sequence::verify(const token_tree & tree, llama_pos pos, int32_t n_rows) {
    batch_.clear();
    for (int32_t i = 0; i < n_rows; ++i) {
        const int32_t node = std::min(i, tree.size() - 1);
        batch_.add(tree.tokens[node], pos + tree.depths[node], true);
    }
    in_tree_ = tree_ && n_rows > 1; // one row stays in any case
    if (!in_tree_) {
        decode(pos, n_rows);
        return;
    }
    tree_->begin(tree, n_rows, pos, state_.exact_rows > 0);
    state_.verify = tree_.get();
    state_.mask   = tree_.get();
    try {
        decode(pos, n_rows);
    } catch (...) {
        tree_->undo();
        undone_ = true;
        throw;
    }
}

bool sequence::keep(const token_tree & tree, llama_pos pos, const std::vector<int32_t> & path) {
    const llama_pos last = pos + tree.height() + 1;
    if (end() != last || (in_tree_ && !tree_->holds(last))) {
        return false;
    }
    if (in_tree_) {
        decoded_ = {}; // no snapshots were written
        tree_->commit(path.data(), (int32_t) path.size());
    } else if ((int32_t) path.size() < tree.size()) {
        cut(pos + (int32_t) path.size());
    }
    return true;
}

// The recurrent layers write a snapshot per row of the last decode and leave older slots as they were, so
// llama_memory_seq_rm would accept a deeper cut and restore garbage (delta-net-base.cpp, build_recurrent_attn).
bool sequence::can_cut(int32_t n_keep) const {
    const int32_t n_back = end() - n_keep;
    return !recurrent_ || (n_back <= (int32_t) llama_n_rs_seq(target_) && n_keep > decoded_.pos && !decoded_.rolled &&
                           decoded_.pos + decoded_.n == end());
}

void sequence::cut(int32_t n_keep) {
    if (!can_cut(n_keep) || !llama_memory_seq_rm(memory(), 0, n_keep, -1)) {
        fail(DW_ERR_UNSUPPORTED, "this model's memory cannot go back from %d to %d positions; reset and evaluate anew",
             end(), n_keep);
    }
    decoded_.rolled = true;
}

size_t sequence::state_bytes() {
    const scope_of work(at_work_);
    return llama_state_seq_get_size_ext(target_, 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
}

std::vector<uint8_t> sequence::save() {
    std::vector<uint8_t> state(state_bytes());
    const scope_of       work(at_work_);
    const size_t         n =
        llama_state_seq_get_data_ext(target_, state.data(), state.size(), 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    if (n == 0 || n != state.size()) {
        fail(DW_ERR_INTERNAL, "the recurrent state took %zu bytes; expected %zu", n, state.size());
    }
    return state;
}

void sequence::restore(const std::vector<uint8_t> & state, int32_t n_keep) {
    decoded_ = {};
    const scope_of work(at_work_);
    const size_t   n =
        llama_state_seq_set_data_ext(target_, state.data(), state.size(), 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    if (n != state.size() || !llama_memory_seq_rm(memory(), 0, n_keep, -1) || end() != n_keep) {
        fail(DW_ERR_DECODE, "the state of position %d could not be put back (%zu of %zu bytes read)", n_keep, n,
             state.size());
    }
}

void sequence::clear() {
    decoded_ = {};
    llama_memory_clear(memory(), true);
}

} // namespace draftwood
