// The first call of a round: who drafts, how far and how wide. See engine.h.

#include "round/engine.h"
#include "round/timer.h"
#include "tree/build.h"

#include <algorithm>
#include <cmath>

namespace draftwood {

int32_t engine::positions_left() const {
    return (int32_t) llama_n_ctx_seq(sequence_.target()) - n_past_;
}

// an image takes more cells than positions, other sequences may share the cache, an open round holds some
int32_t engine::room() const {
    return std::min(positions_left(), sequence_.context().free_cells(sequence_.id()));
}

int32_t engine::max_draft() const {
    const int32_t n_rows = std::min(room(), sequence_.context().row_limit());
    return sequence_.can_draft() ? std::max(0, std::min(params_.draft_tokens, n_rows - 1)) : 0;
}

// every row takes a cell, and the token behind the last one must have a position
int32_t engine::max_nodes() const {
    const int32_t budget = std::min(
        { params_.tree_budget, room(), (int32_t) llama_n_ubatch(sequence_.target()), sequence_.context().row_limit() });
    return sequence_.can_draft() && sequence_.tree_refusal().empty() ? std::max(0, budget) : 0;
}

int32_t engine::propose(llama_token last, int32_t wanted) {
    start(last);
    const int32_t n_max = std::min(wanted, max_draft());
    if (drafter_ && n_max > 0) {
        if (params_.length == DW_LENGTH_AUTO) {
            draft_best(n_max);
        } else {
            draft(n_max, max_nodes(), /*spine*/ 0);
        }
    }
    return tree_.n_drafts();
}

// with whom, as far and as wide as it pays; n-grams cost next to nothing, so they are looked up before the choice
void engine::draft_best(int32_t n_max) {
    if (params_.tree_budget > 0) { // of rows, a chain's too
        n_max = std::min(n_max, params_.tree_budget - 1);
    }
    if (costs_.is_outdated()) {
        costs_.update_curve();
    }
    token_tree found(tree_.tokens[0]);
    if (ngram_) {
        ngram_->draft(request(n_max, 0, 0), found);
    }
    const draft_choice choice = costs_.choose({ n_max, found.n_drafts() });
    drafted_by_               = choice.source;
    if (choice.source == from_ngrams || choice.n_tokens == 0) {
        caught_up_ = false;
    }
    if (choice.source == from_ngrams) {
        tree_ = select(found, choice.n_tokens + 1, choice.n_tokens);
        stats_.n_ngram_rounds++;
    } else {
        const int32_t budget = costs_.pays_to_branch(choice) ? max_nodes() : 0;
        draft(choice.n_tokens, budget, choice.n_tokens);
        if (budget > 0) {
            tree_ =
                select(tree_, costs_.choose_tree_size(choice, beside_spine(tree_, choice.n_tokens)), choice.n_tokens);
        }
    }
    stats_.n_paused_rounds += choice.n_tokens == 0 ? 1 : 0;
}

// let the drafter grow tree_; one that fails costs drafts, never the request
bool engine::ask(const draft_request & request) {
    bool drafted = false;
    try {
        drafted = drafter_->draft(request, tree_);
    } catch (const std::exception &) {
        drafter_->reset();
        tree_ = token_tree(tree_.tokens[0]);
    }
    stats_.n_cold_rounds += drafted ? 0 : 1;
    ahead_ = request.ahead && tree_.n_drafts() > 0;
    return drafted;
}

// Fetch the tokens of a draft that was made ahead.
void engine::settle() {
    if (ahead_) {
        drafter_->settle(tree_);
        ahead_ = false;
    }
}

// Where times decide, a tree only branches off its spine: what a wider one costs to draft is not in the curve.
draft_request engine::request(int32_t depth, int32_t budget, int32_t spine) const {
    const int32_t width = params_.length == DW_LENGTH_AUTO ? 1 : max_tree_nodes;
    const bool    ahead = budget == 0 && params_.draft_p_min == 0.0f && drafter_->can_draft_ahead();
    return { tree_.tokens[0], n_past_, depth, budget, spine, width, params_.draft_p_min, temperature_, ahead };
}

// let the drafter continue the newest token by up to `depth` tokens; with a budget by a tree, n-grams joining in
void engine::draft(int32_t depth, int32_t budget, int32_t spine) {
    if (depth < 1) {
        return;
    }
    const int64_t start_us = draft_start_us_ = ggml_time_us();
    const bool    drafted                    = ask(request(depth, budget, spine));
    if (measuring_) { // what it takes by itself
        settle();
    }
    if (budget > 0) {
        join_ngrams(depth);
        tree_ = select(tree_, budget, spine);
    }
    const int64_t took = ggml_time_us() - start_us;
    stats_.t_draft_us += took;
    if (drafted && caught_up_ && budget == 0 && tree_.n_drafts() == depth && !ahead_) {
        costs_.add_draft_time(depth, took);
    }
    caught_up_ = drafted;
}

// what n-grams find, as likely as it was so far
void engine::join_ngrams(int32_t depth) {
    if (!ngram_) {
        return;
    }
    token_tree found(tree_.tokens[0]);
    ngram_->draft(request(depth, 0, 0), found);
    for (int32_t i = 1; i < found.size(); ++i) {
        found.log_probs[i] = found.log_probs[i - 1] + std::log((float) costs_.acceptance(from_ngrams, i - 1));
    }
    merge(tree_, found);
}

void engine::propose_given(llama_token last, const llama_token * draft, int32_t n_draft) {
    if (n_draft < 0 || n_draft > params_.draft_tokens) {
        fail(DW_ERR_ARGUMENT, "a draft of %d tokens; expected 0 to draft_tokens = %d", n_draft, params_.draft_tokens);
    }
    sequence_.require_tokens(draft, n_draft);
    if (n_draft > 0) {
        sequence_.prepare_drafts(params_.draft_tokens, params_.tree_budget);
    }
    start(last);
    for (int32_t i = 0; i < std::min(n_draft, max_draft()); ++i) {
        tree_.add(i, draft[i], 0.0f);
    }
}

void engine::propose_tree(const token_tree & tree) {
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
                 llama_n_ctx(sequence_.target()));
        }
    };
    require_room(positions_left());
    start(tree.tokens[0]);
    require_room(room());
    if (sequence_.can_draft()) { // else a plain step makes the state our own
        tree_ = tree;
    }
}

} // namespace draftwood
