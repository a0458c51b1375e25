// Decoding into the target's sequence, and going back: see sequence.h.

#include "round/sequence.h"

#include "llama/memory.h"

#include <algorithm>

namespace draftwood {

namespace {

bool is_recurrent(const llama_context * ctx) {
    const llama_model * model = llama_get_model(ctx);
    return llama_model_is_hybrid(model) || llama_model_is_recurrent(model);
}

} // namespace

sequence::sequence(llama_context * target, const dw_params & params, sequence_listener & listener) :
    shared_(target_context::of(target, params.exact_rows, params.results == DW_RESULTS_TOP)),
    seq_(params.seq_id),
    listener_(listener),
    recurrent_(is_recurrent(target)),
    mrope_(uses_mrope(llama_get_model(target))) {
    shared_->add(seq_, listener);
}

sequence::~sequence() {
    shared_->remove(listener_);
}

llama_pos sequence::end() const {
    const llama_pos last = llama_memory_seq_pos_max(memory(), seq_);
    return shared_->is_step(seq_, last) ? last : last + 1;
}

void sequence::require_tokens(const llama_token * tokens, int32_t n_tokens) const {
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(llama())));
    for (int32_t i = 0; i < n_tokens; ++i) {
        if (tokens[i] < 0 || tokens[i] >= n_vocab) {
            fail(DW_ERR_ARGUMENT, "token %d; expected 0 to %d", tokens[i], n_vocab - 1);
        }
    }
}

void sequence::decode(const llama_token * tokens, int32_t n, llama_pos pos, bool all_logits) {
    decoded_ = {};
    shared_->batch().clear();
    for (int32_t i = 0; i < n; ++i) {
        shared_->batch().add(tokens[i], pos + i, all_logits || i == n - 1, seq_);
    }
    shared_->decode({ { seq_, pos } }, n, {}, [] {});
    decoded_ = { pos, n, false };
}

void sequence::prepare_drafts(int32_t draft_tokens, int32_t tree_budget) {
    const uint32_t n_rs_seq = llama_n_rs_seq(llama());
    // a verify is one ubatch; with snapshots llama_batch_allocr::split_equal asserts n_ubatch > n_rs_seq + 1
    const int32_t n_rows = std::max({ draft_tokens + 1, tree_budget, n_rs_seq > 0 ? (int32_t) n_rs_seq + 2 : 0 });
    if (llama_n_ubatch(llama()) < (uint32_t) n_rows) {
        const std::string trees = tree_budget > 1 ? " in trees of " + std::to_string(tree_budget) : "";
        fail(DW_ERR_UNSUPPORTED, "n_ubatch is %u; %d draft tokens%s need at least %d", llama_n_ubatch(llama()),
             draft_tokens, trees.c_str(), n_rows);
    }
    if (recurrent_ && n_rs_seq >= (uint32_t) draft_tokens) {
        tree_refusal_ = "the context keeps snapshots of its recurrent layers (n_rs_seq)";
        return;
    }
    shared_->prepare_trees(std::max(n_rows, bucket(tree_budget)));
    tree_refusal_ = shared_->tree_refusal();
    if (recurrent_ && !trees()) {
        fail(
            DW_ERR_UNSUPPORTED,
            "the context keeps %u recurrent snapshots, draft_tokens is %d, and no verify can do without (%s); expected "
            "n_rs_seq >= draft_tokens",
            llama_n_rs_seq(llama()), draft_tokens, tree_refusal_.c_str());
    }
}

int32_t sequence::rows_of(const token_tree & tree, int32_t room) const {
    const int32_t n_rows = tree.is_chain() ? tree.size() : bucket(tree.size());
    const int32_t most   = trees() ? std::min({ room, (int32_t) llama_n_ubatch(llama()), max_outputs(llama()),
                                                trees()->max_rows(), shared_->row_limit() })
                                   : 0;
    return n_rows <= most ? n_rows : tree.size();
}

void sequence::verified(llama_pos pos, int32_t n_rows, tree_state * by) {
    left_in_ = by;
    decoded_ = { pos, n_rows, false };
}

bool sequence::keep(const token_tree & tree, llama_pos pos, const std::vector<int32_t> & path) {
    const llama_pos last = pos + tree.height() + 1;
    if (end() != last || (left_in_ && !left_in_->holds(seq_, last))) {
        return false;
    }
    if (left_in_) {
        decoded_ = {}; // no snapshots were written
        left_in_->commit(seq_, tree, path);
    } else if ((int32_t) path.size() < tree.size()) {
        cut(pos + (int32_t) path.size());
    }
    return true;
}

// The recurrent layers write a snapshot per row of the last decode and leave older slots as they were, so
// llama_memory_seq_rm would accept a deeper cut and restore garbage (delta-net-base.cpp, build_recurrent_attn).
bool sequence::can_cut(int32_t n_keep) const {
    const int32_t n_back = end() - n_keep;
    return !recurrent_ || (n_back <= (int32_t) llama_n_rs_seq(llama()) && n_keep > decoded_.pos && !decoded_.rolled &&
                           decoded_.pos + decoded_.n == end());
}

void sequence::cut(int32_t n_keep) {
    shared_->drop_step();
    if (!can_cut(n_keep) || !remove_from(llama(), seq_, n_keep)) {
        fail(DW_ERR_UNSUPPORTED, "this model's memory cannot go back from %d to %d positions; reset and evaluate anew",
             end(), n_keep);
    }
    decoded_.rolled = true;
}

size_t sequence::state_bytes() const {
    shared_->drop_step();
    return shared_->working(
        [&] { return llama_state_seq_get_size_ext(llama(), seq_, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY); });
}

std::vector<uint8_t> sequence::save() const {
    std::vector<uint8_t> state(state_bytes());
    const size_t         n = shared_->working([&] {
        return llama_state_seq_get_data_ext(llama(), state.data(), state.size(), seq_,
                                                    LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    });
    if (n == 0 || n != state.size()) {
        fail(DW_ERR_INTERNAL, "the recurrent state took %zu bytes; expected %zu", n, state.size());
    }
    return state;
}

void sequence::restore(const uint8_t * state, size_t n_bytes, int32_t n_keep) {
    decoded_ = {};
    shared_->drop_step();
    const size_t n = shared_->working([&] {
        return llama_state_seq_set_data_ext(llama(), state, n_bytes, seq_, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    });
    if (n != n_bytes || !llama_memory_seq_rm(memory(), seq_, n_keep, -1) || end() != n_keep) {
        fail(DW_ERR_DECODE, "the state of position %d could not be put back (%zu of %zu bytes read)", n_keep, n,
             n_bytes);
    }
}

void sequence::clear() {
    decoded_ = {};
    shared_->drop_step();
    llama_synchronize(llama()); // what was dropped may still be computed, and clearing does not wait for it
    shared_->finish_trees();
    if (shared_->is_empty(/*but*/ seq_)) {
        llama_memory_clear(memory(), true);
    } else {
        llama_memory_seq_rm(memory(), seq_, -1, -1);
    }
}

} // namespace draftwood
