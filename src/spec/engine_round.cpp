// The other calls of a round: verify, the walk over what was verified, commit. See engine.h.

#include "build.h"
#include "engine.h"
#include "llama-context.h"
#include "timer.h"

#include <algorithm>
#include <array>

namespace draftwood {

// one context, each engine once, all with a proposal; in the order of their sequences
void engine::require_together(std::vector<engine *> & engines) {
    const auto by_sequence = [](const engine * a, const engine * b) { return a->sequence_.id() < b->sequence_.id(); };
    std::sort(engines.begin(), engines.end(), by_sequence);
    for (size_t i = 0; i < engines.size(); ++i) {
        engine & each = *engines[i];
        if (!each.proposed_) {
            fail(DW_ERR_STATE, "dw_verify without a dw_propose before it");
        }
        each.require_whole("a verify");
        if (!each.sequence_.can_draft()) { // others copied or cleared the state since the proposal
            each.tree_  = token_tree(each.tree_.tokens[0]);
            each.drawn_ = {};
        }
        if (&each.sequence_.context() != &engines[0]->sequence_.context() || (i > 0 && engines[i] == engines[i - 1])) {
            fail(DW_ERR_ARGUMENT, "expected engines of one llama_context, each once");
        }
    }
}

// In one ubatch every sequence has as many rows as the largest tree's. 1 where one has no room for them, or llama.cpp
// would split the decode or copy states: all take a plain step then.
int32_t engine::rows_together(const std::vector<engine *> & engines) {
    target_context &          context = engines[0]->sequence_.context();
    std::vector<llama_seq_id> sequences;
    int32_t                   n_rows = 1, room = INT32_MAX;
    bool                      trees = true;
    for (const engine * each : engines) {
        sequences.push_back(each->sequence_.id());
        n_rows = std::max(n_rows, each->sequence_.rows_of(each->tree_, each->room()));
        room   = std::min(room, each->room());
        trees  = trees && each->tree_refusal().empty();
    }
    if (engines.size() == 1) {
        return n_rows;
    }
    n_rows                  = bucket(n_rows);
    const int32_t n         = n_rows * (int32_t) engines.size();
    const bool    one_cache = context.get()->get_cparams().kv_unified;
    if (!trees || (one_cache ? n : n_rows) > room || n > (int32_t) llama_n_ubatch(context.get())) {
        return 1;
    }
    context.prepare_trees(n);
    const bool holds = context.trees() && context.trees()->max_rows() >= n;
    return holds && context.trees()->ready(sequences) ? n_rows : 1;
}

void engine::verify(std::vector<engine *> engines) {
    require_together(engines);
    target_context &                context = engines[0]->sequence_.context();
    const int32_t                   n_rows  = rows_together(engines);
    std::vector<tree_state::member> members;
    for (engine * each : engines) {
        if (n_rows == 1) {
            each->tree_ = token_tree(each->tree_.tokens[0]);
        }
        members.push_back({ each->sequence_.id(), &each->tree_, each->n_past_ });
        each->proposed_ = false;
        each->walk_     = {};
        each->lost_     = true;
    }
    const int64_t start_us = ggml_time_us();
    try {
        for (engine * each : engines) {
            each->feed_draft(n_rows, /*alone*/ engines.size() == 1);
        }
        context.verify(members, n_rows);
    } catch (const failure & e) {
        for (engine * each : engines) { // without room nothing was touched, and what was is undone where trees are
            each->lost_ = e.code() != DW_ERR_CONTEXT && !(n_rows > 1 && each->tree_refusal().empty());
            each->sequence_.unknown();
        }
        throw;
    }
    llama_synchronize(context.get()); // sampling waits for it anyway, and here its time is known
    const int64_t took = ggml_time_us() - start_us;
    for (size_t i = 0; i < engines.size(); ++i) {
        engines[i]->opened((int32_t) i * n_rows, n_rows, took, /*alone*/ engines.size() == 1);
    }
}

// A draft made ahead goes from its device into the verify's rows, where these are its own; else its tokens come first.
void engine::feed_draft(int32_t n_rows, bool alone) {
    made_ahead_ = ahead_;
    if (ahead_ && alone && n_rows == tree_.size()) {
        drafter_->feed_verify(sequence_.context().state(), tree_.n_drafts());
        stats_.n_ahead_rounds++;
    } else {
        settle();
    }
}

// the round's rows are there, node 0 in first_row of the batch
void engine::opened(int32_t first_row, int32_t n_rows, int64_t took, bool alone) {
    sequence_.verified(n_past_, n_rows);
    lost_      = false;
    verify_us_ = alone ? took : 0; // else it is not what so many rows take
    if (made_ahead_ && alone) {    // the wait was for the draft, too
        verify_us_ = std::max<int64_t>(1, took - (int64_t) pace_.drafting(tree_.n_drafts()));
    }
    walk_ = { first_row, n_rows, { 0 }, 0, n_past_, /*alive*/ true, /*open*/ true };
    n_past_ += 1; // the root is part of the text already
    stats_.t_verify_us += took;
    stats_.n_rounds++;
    stats_.n_drafted += tree_.n_drafts();
    stats_.n_tree_rounds += tree_.is_chain() ? 0 : 1;
    stats_.n_padding += n_rows - tree_.size();
    for (int32_t depth = 0; depth < tree_.height(); ++depth) {
        stats_.drafted_at[depth]++;
    }
}

bool engine::row(int32_t & row, int32_t & n_past) const {
    if (!walk_.alive) {
        return false;
    }
    row    = walk_.first_row + walk_.path[walk_.n_sampled];
    n_past = walk_.pos + walk_.n_sampled + 1;
    return true;
}

llama_token engine::walk_on(llama_sampler * sampler, const bool * accept) {
    if (!walk_.alive) {
        fail(DW_ERR_STATE, "dw_next without a row to sample; call dw_propose and dw_verify, or dw_eval");
    }
    timer t(stats_.t_sample_us);
    settle();
    const int32_t i      = walk_.n_sampled;
    const int32_t node   = walk_.path[i];
    const int32_t n_past = n_past_;
    // taken before it is sampled: a logits processor that saves the state ends the round through on_flush
    walk_.n_sampled = i + 1;
    n_past_         = walk_.pos + i + 1;
    llama_token token;
    try {
        token = sample(sampler, node);
        token = accept ? scheduled(node, *accept, token) : token;
    } catch (...) {
        if (walk_.alive) {
            walk_.n_sampled = i;
            n_past_         = n_past;
        }
        throw;
    }
    const int32_t child = walk_.alive && walk_.open ? tree_.child(node, token) : -1;
    walk_.alive         = child >= 0;
    stats_.n_emitted++;
    if (walk_.alive) {
        walk_.path.push_back(child);
        stats_.n_accepted++;
        stats_.accepted_at[i]++;
    }
    return token;
}

// What a schedule makes of a sample: the child on the likeliest path, or a token that no child has.
llama_token engine::scheduled(int32_t node, bool accept, llama_token sampled) const {
    const std::vector<int32_t> spine = tree_.spine();
    const auto                 here  = std::find(spine.begin(), spine.end(), node);
    const bool                 more  = here != spine.end() && here + 1 != spine.end();
    if (accept && walk_.open && more) {
        return tree_.tokens[*(here + 1)];
    }
    while (tree_.child(node, sampled) >= 0) {
        sampled = sampled > 0 ? sampled - 1
                              : llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(sequence_.target()))) - 1;
    }
    return sampled;
}

// From the target's distribution at a node; where its children were drawn, one of them as often as they may be.
llama_token engine::sample(llama_sampler * sampler, int32_t node) {
    const int32_t row = walk_.first_row + node;
    if (walk_.open && node < (int32_t) drawn_.offers.size() && !drawn_.offers[node].empty()) {
        return sample_drawn(sampler, node, row);
    }
    if (n_enough_ > 0 && n_enough_ <= dw_n_top && sequence_.context().left().has_top()) {
        return sample_top(sampler, row);
    }
    stats_.n_logits_rows++;
    return llama_sampler_sample(sampler, sequence_.target(), row);
}

// From the best tokens of a row alone, in the order of their logits.
llama_token engine::sample_top(llama_sampler * sampler, int32_t row) {
    const top_row                          top = sequence_.context().left().top(row);
    std::array<llama_token_data, dw_n_top> best;
    for (size_t i = 0; i < best.size(); ++i) {
        best[i] = { top.tokens[i], top.logits[i], 0.0f };
    }
    llama_token_data_array left{ best.data(), best.size(), -1, /*sorted*/ true };
    llama_sampler_apply(sampler, &left);
    if (left.selected < 0) {
        fail(DW_ERR_ARGUMENT, "the sampler chose no token; expected a chain that ends in a choice");
    }
    const llama_token token = left.data[left.selected].id;
    llama_sampler_accept(sampler, token);
    return token;
}

llama_token engine::sample_drawn(llama_sampler * sampler, int32_t node, int32_t row) {
    const float *                 logits = llama_get_logits_ith(sequence_.target(), row);
    std::vector<llama_token_data> all(llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(sequence_.target()))));
    for (size_t i = 0; i < all.size(); ++i) {
        all[i] = { (llama_token) i, logits[i], 0.0f };
    }
    llama_token_data_array left{ all.data(), all.size(), -1, false };
    llama_sampler_apply(sampler, &left);
    if (left.selected < 0) {
        fail(DW_ERR_ARGUMENT, "the sampler chose no token; expected a chain that ends in a choice");
    }
    std::vector<weighted> p; // none where the last sampler only compares, as greedy does: its choice stands
    for (size_t i = 0; i < left.size; ++i) {
        if (left.data[i].p > 0.0f) {
            p.push_back({ left.data[i].id, left.data[i].p });
        }
    }
    std::vector<int32_t> children;
    for (int32_t i = node + 1; i < tree_.size(); ++i) {
        if (tree_.parents[i] == node) {
            children.push_back(tree_.tokens[i]);
        }
    }
    const llama_token token =
        p.empty() ? left.data[left.selected].id : walk_sampled(std::move(p), drawn_.offers[node], children, rng_);
    llama_sampler_accept(sampler, token);
    return token;
}

void engine::commit() {
    if (!walk_.open) {
        return;
    }
    const int64_t start_us = ggml_time_us();
    // the root stays even if its row was never sampled: its token was emitted before
    const int32_t              n_kept = std::max(walk_.n_sampled, 1);
    const std::vector<int32_t> path(walk_.path.begin(), walk_.path.begin() + n_kept);
    if (drawn_.offers.empty()) { // what is drawn is taken otherwise than what is chosen
        learn(path);
    }
    walk_.open  = false;
    walk_.alive = false;
    settle();

    bool whole = false;
    changing([&] { whole = sequence_.keep(tree_, walk_.pos, path); });
    if (!whole) { // somebody cleared the memory, and the round went with it; or changed it, and nobody knows what is
                  // left
        lost_ = sequence_.end() > walk_.pos;
        forget();
        checkpoints_.clear();
        n_past_ = sequence_.end();
        gap_    = 0;
        return;
    }
    n_past_ = walk_.pos + n_kept;
    std::vector<llama_token> kept;
    std::vector<int32_t>     rows;
    for (const int32_t node : path) {
        kept.push_back(tree_.tokens[node]);
        rows.push_back(walk_.first_row + node);
    }
    observe({ kept.data(), rows.data(), n_kept, walk_.pos });
    const int64_t took = ggml_time_us() - start_us;
    stats_.t_commit_us += took;
    if (verify_us_ > 0) {
        pace_.verified(walk_.n_rows, verify_us_ + took);
    }
}

// how good the draft was; what was not sampled was not refused
void engine::learn(const std::vector<int32_t> & path) {
    const std::vector<int32_t> spine   = tree_.spine();
    int32_t                    n_spine = 0; // of the path, root included
    const int32_t              n_path  = (int32_t) path.size();
    while (n_spine < std::min(n_path, (int32_t) spine.size()) && path[n_spine] == spine[n_spine]) {
        n_spine++;
    }
    const bool all_judged = !walk_.alive || n_spine < n_path;
    pace_.walked(drafted_by_, all_judged ? (int32_t) spine.size() - 1 : n_path - 1, n_spine - 1);
    if (!walk_.alive && !tree_.is_chain()) {
        pace_.branched(beside_spine(tree_, (int32_t) spine.size() - 1), n_path - n_spine);
    }
}

void engine::rewind() {
    if (walk_.open || walk_.n_sampled < 1 || n_past_ != walk_.pos + walk_.n_sampled || sequence_.end() != n_past_) {
        fail(DW_ERR_STATE, "no logits of this engine's last decode stand for position %d; evaluate a token first",
             n_past_);
    }
    walk_.n_sampled--;
    walk_.path.resize(walk_.n_sampled + 1); // the rows behind it are gone
    walk_.alive = true;
}

} // namespace draftwood
