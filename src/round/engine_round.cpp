// Verify and commit of a round: see engine.h.

#include "llama/facts.h"
#include "round/engine.h"
#include "round/timer.h"
#include "tree/build.h"

#include <algorithm>

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
            each.tree_ = token_tree(each.tree_.tokens[0]);
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
    const bool    one_cache = has_unified_kv(context.get());
    const int32_t most      = std::min((int32_t) llama_n_ubatch(context.get()), context.row_limit());
    if (!trees || (one_cache ? n : n_rows) > room || n > most) {
        return 1;
    }
    context.prepare_trees(n);
    const bool holds = context.trees() && context.trees()->max_rows() >= n;
    return holds && context.trees()->ready(sequences) ? n_rows : 1;
}

void engine::verify(std::vector<engine *> engines) {
    require_together(engines);
    while (!try_verify(engines)) { // no memory for so many rows: with as many as there is memory for
        for (engine * each : engines) {
            each->shorten();
        }
    }
}

// fewer nodes, as many as a verify may have rows now
void engine::shorten() {
    settle();
    const int32_t limit = sequence_.context().row_limit();
    if (tree_.size() > limit) {
        tree_ = select(tree_, limit, tree_.is_chain() ? limit - 1 : 0);
    }
}

// False where there was no memory for so many rows: the context is as before, and may have fewer from now on.
bool engine::try_verify(const std::vector<engine *> & engines) {
    target_context &                context = engines[0]->sequence_.context();
    const int32_t                   n_rows  = rows_together(engines);
    std::vector<tree_state::member> members;
    for (engine * each : engines) {
        if (n_rows == 1) {
            each->tree_  = token_tree(each->tree_.tokens[0]);
            each->ahead_ = false;
        }
        members.push_back({ each->sequence_.id(), &each->tree_, each->n_past_ });
        each->proposed_ = false;
        each->walk_     = {};
        each->lost_     = true;
    }
    const bool on_trees =
        std::all_of(engines.begin(), engines.end(), [](const engine * each) { return each->tree_refusal().empty(); });
    const int64_t start_us = ggml_time_us();
    try {
        decode_request request;
        for (engine * each : engines) {
            each->feed_draft(request, n_rows, /*alone*/ engines.size() == 1);
        }
        context.verify(members, n_rows, on_trees, std::move(request));
    } catch (const failure & e) {
        for (engine * each : engines) {
            each->lost_ = !context.intact();
            each->sequence_.unknown();
        }
        if (e.code() == DW_ERR_MEMORY && n_rows > 1 && context.intact()) {
            context.limit_rows(n_rows * (int32_t) engines.size());
            return false;
        }
        fail(e.code() == DW_ERR_MEMORY ? DW_ERR_DECODE : e.code(), "%s", e.what()); // the caller's is the drafter's
    }
    llama_synchronize(context.get()); // sampling waits for it anyway, and here its time is known
    const int64_t took = ggml_time_us() - start_us;
    for (size_t i = 0; i < engines.size(); ++i) {
        engines[i]->opened((int32_t) i * n_rows, n_rows, took, /*alone*/ engines.size() == 1);
    }
    return true;
}

// A draft made ahead goes from its device into the verify's rows, where these are its own; else its tokens come first.
void engine::feed_draft(decode_request & request, int32_t n_rows, bool alone) {
    fed_ahead_ = ahead_ && alone && n_rows == tree_.size();
    if (fed_ahead_) {
        drafter_->feed_verify(request, tree_.n_drafts());
    } else {
        settle();
    }
}

// the round's rows are there, node 0 in first_row of the batch
void engine::opened(int32_t first_row, int32_t n_rows, int64_t took, bool alone) {
    sequence_.verified(n_past_, n_rows);
    lost_      = false;
    verify_us_ = alone ? took : 0; // else it is not what so many rows take
    if (fed_ahead_) {              // draft and verify ran one after the other, and only their sum is known
        const double  drafting = costs_.draft_cost(tree_.n_drafts());
        const int64_t both     = ggml_time_us() - draft_start_us_;
        verify_us_             = drafting > 0.0 ? std::max<int64_t>(1, both - (int64_t) drafting) : 0;
        stats_.n_ahead_rounds++;
    }
    walk_ = { first_row, n_rows, { 0 }, 0, n_past_, /*alive*/ true, /*open*/ true };
    n_past_ += 1; // the root is part of the text already
    stats_.t_verify_us += took;
    stats_.n_rounds++;
    stats_.n_drafted += tree_.n_drafts();
    stats_.n_tree_rounds += tree_.is_chain() ? 0 : 1;
    stats_.n_padding += n_rows - tree_.size();
    stats_.n_shared_rounds +=
        sequence_.context().short_of_memory() || (drafter_ && drafter_->short_of_memory()) ? 1 : 0;
    for (int32_t depth = 0; depth < tree_.height(); ++depth) {
        stats_.drafted_at[depth]++;
    }
}

// the same rows again change nothing: the state is read only, and cells and factors get what they have
double engine::replay(int32_t n_times) {
    if (!walk_.open || walk_.n_rows < 2 || n_times < 1 || !tree_refusal().empty()) {
        fail(DW_ERR_STATE, "%d replays; expected one or more, of a verify of two rows or more whose round is open",
             n_times);
    }
    return sequence_.context().replay(n_times);
}

void engine::commit() {
    if (!walk_.open) {
        return;
    }
    const int64_t start_us = ggml_time_us();
    // the root stays even if its row was never sampled: its token was emitted before
    const int32_t              n_kept = std::max(walk_.n_sampled, 1);
    const std::vector<int32_t> path(walk_.path.begin(), walk_.path.begin() + n_kept);
    learn(path);
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
        costs_.add_verify_time(walk_.n_rows, verify_us_ + took);
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
    costs_.add_acceptance(drafted_by_, all_judged ? (int32_t) spine.size() - 1 : n_path - 1, n_spine - 1);
    if (!walk_.alive && !tree_.is_chain()) {
        costs_.add_branch_acceptance(beside_spine(tree_, (int32_t) spine.size() - 1), n_path - n_spine);
    }
}

} // namespace draftwood
