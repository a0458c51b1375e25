// The speculative round: see engine.h and draftwood.h.

#include "engine.h"

#include "build.h"
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
    if (params.tree_budget < 0 || params.tree_budget > max_tree_nodes) {
        fail(DW_ERR_ARGUMENT, "tree_budget is %d; expected 0 (chains) or 1 to %d nodes", params.tree_budget,
             max_tree_nodes);
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

// of the paths to the nodes beside the spine, which is `n_spine` nodes long after the root; best first
std::vector<double> probabilities(const token_tree & tree, int32_t n_spine) {
    std::vector<double> out;
    const auto          spine = tree.spine();
    for (int32_t i = 1; i < tree.size(); ++i) {
        const int32_t depth = tree.depths[i];
        if (depth > n_spine || depth >= (int32_t) spine.size() || spine[depth] != i) {
            out.push_back(std::exp((double) tree.log_probs[i]));
        }
    }
    std::sort(out.rbegin(), out.rend());
    return out;
}

} // namespace

engine::engine(llama_context * target, const llama_context_params & context_params, const dw_params & params) :
    params_(checked(target, params)),
    sequence_(target, params.seq_id, params.exact_rows, *this),
    checkpoints_((size_t) params.checkpoint_bytes) {
    if (params.drafter != DW_DRAFTER_NONE) {
        sequence_.prepare_drafts(params.draft_tokens, params.tree_budget);
    }
    drafter_ = make_drafter(target, context_params, params);
    n_past_  = sequence_.end();
    stats_reset();
    const bool in_company = params.length == DW_LENGTH_AUTO || params.tree_budget > 0;
    if (in_company && drafter_ && params.drafter != DW_DRAFTER_NGRAM) {
        ngram_ = std::make_unique<ngram_drafter>();
    }
    if (params.length == DW_LENGTH_AUTO && drafter_) {
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
            draft(n, 0, 0);
            while (tree_.n_drafts() < n) {
                tree_.add(tree_.n_drafts(), token, 0.0f);
            }
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
void engine::observe(const kept_rows & kept) {
    each_drafter([&](drafter & d) {
        try {
            d.observe(kept);
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
    tree_       = token_tree(last);
    drawn_      = {};
    proposed_   = true;
    drafted_by_ = pace::asked;
}

int32_t engine::max_draft() const {
    return sequence_.can_draft() ? std::max(0, std::min(params_.draft_tokens, room() - 1)) : 0;
}

// every row takes a cell, and the token behind the last one must have a position
int32_t engine::max_nodes() const {
    const int32_t budget = std::min({ params_.tree_budget, room(), (int32_t) llama_n_ubatch(sequence_.target()) });
    return sequence_.can_draft() && sequence_.tree_refusal().empty() ? std::max(0, budget) : 0;
}

int32_t engine::propose(llama_token last, int32_t wanted) {
    start(last);
    const int32_t n_max = std::min(wanted, max_draft());
    if (drafter_ && n_max > 0) {
        if (draws_ && temperature_ > 0.0f && max_nodes() > 1) {
            draft_drawn(n_max, max_nodes());
        } else if (params_.length == DW_LENGTH_AUTO) {
            draft_best(n_max);
        } else {
            draft(n_max, max_nodes(), /*spine*/ 0);
        }
    }
    return tree_.n_drafts();
}

// with whom, as far and as wide as it pays; n-grams cost next to nothing, so they are looked up before the choice
void engine::draft_best(int32_t n_max) {
    token_tree found(tree_.tokens[0]);
    if (ngram_) {
        ngram_->draft(request(n_max, 0, 0), found);
    }
    const pace::choice choice = pace_.choose({ n_max, found.n_drafts() });
    drafted_by_               = choice.by;
    if (choice.by == pace::ngram || choice.n == 0) {
        caught_up_ = false;
    }
    if (choice.by == pace::ngram) {
        tree_ = select(found, choice.n + 1, choice.n);
        stats_.n_ngram_rounds++;
    } else {
        const int32_t budget = pace_.pays_to_branch(choice) ? max_nodes() : 0;
        draft(choice.n, budget, choice.n);
        if (budget > 0) {
            tree_ = select(tree_, pace_.widen(choice, probabilities(tree_, choice.n)), choice.n);
        }
    }
    stats_.n_paused_rounds += choice.n == 0 ? 1 : 0;
}

// A drawn tree is verified as it was drawn, or the walk would not be exact: nothing joins it, nothing is left out.
void engine::draft_drawn(int32_t depth, int32_t budget) {
    timer t(stats_.t_draft_us);
    drawn_                = { &rng_, sampled_shape(budget, depth, DW_MAX_DRAFT), {} };
    draft_request request = this->request(depth, budget, 0);
    request.drawn         = &drawn_;
    bool drafted          = false;
    try {
        drafted = drafter_->draft(request, tree_);
    } catch (const std::exception &) { // costs drafts, never the request
        drafter_->reset();
    }
    if (!drafted) {
        tree_  = token_tree(tree_.tokens[0]);
        drawn_ = {};
        stats_.n_cold_rounds++;
    }
    caught_up_ = false;
}

void engine::set_drawn(bool drawn, uint64_t seed) {
    draws_ = drawn;
    rng_.seed(seed);
}

// Where times decide, a tree only branches off its spine: what a wider one costs to draft is not in the curve.
draft_request engine::request(int32_t depth, int32_t budget, int32_t spine) const {
    const int32_t width = params_.length == DW_LENGTH_AUTO ? 1 : max_tree_nodes;
    return { tree_.tokens[0], n_past_, depth, budget, spine, width, params_.draft_p_min, temperature_, nullptr };
}

// let the drafter continue the newest token by up to `depth` tokens; with a budget by a tree, n-grams joining in
void engine::draft(int32_t depth, int32_t budget, int32_t spine) {
    if (depth < 1) {
        return;
    }
    const int64_t start_us = ggml_time_us();
    bool          drafted  = false;
    try {
        drafted = drafter_->draft(request(depth, budget, spine), tree_);
    } catch (const std::exception &) { // costs drafts, never the request
        drafter_->reset();
        tree_ = token_tree(tree_.tokens[0]);
    }
    if (budget > 0) {
        join_ngrams(depth);
        tree_ = select(tree_, budget, spine);
    }
    const int64_t took = ggml_time_us() - start_us;
    stats_.t_draft_us += took;
    stats_.n_cold_rounds += drafted ? 0 : 1;
    if (drafted && caught_up_ && budget == 0 && tree_.n_drafts() == depth) {
        pace_.drafted(depth, took);
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
        found.log_probs[i] = found.log_probs[i - 1] + std::log((float) pace_.acceptance(pace::ngram, i - 1));
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
    if (tree.size() > room()) {
        fail(DW_ERR_CONTEXT, "a tree of %d nodes at position %d of a context of %u tokens", tree.size(), n_past_,
             llama_n_ctx(sequence_.target()));
    }
    start(tree.tokens[0]);
    if (sequence_.can_draft()) { // else a plain step makes the state our own
        tree_ = tree;
    }
}

// In one ubatch every sequence has as many rows as the largest tree's. Where one has no room for them, or llama.cpp would
// split or copy, all take a plain step.
void engine::verify(std::vector<engine *> engines) {
    const auto by_sequence = [](const engine * a, const engine * b) { return a->sequence_.id() < b->sequence_.id(); };
    std::sort(engines.begin(), engines.end(), by_sequence);
    target_context &          context = engines[0]->sequence_.context();
    std::vector<llama_seq_id> sequences;
    int32_t                   n_rows = 1, room = INT32_MAX;
    for (engine * each : engines) {
        if (!each->proposed_) {
            fail(DW_ERR_STATE, "dw_verify without a dw_propose before it");
        }
        if (&each->sequence_.context() != &context || (!sequences.empty() && sequences.back() == each->sequence_.id())) {
            fail(DW_ERR_ARGUMENT, "expected engines of one llama_context, each once");
        }
        sequences.push_back(each->sequence_.id());
        n_rows = std::max(n_rows, each->sequence_.rows_of(each->tree_, each->room()));
        room   = std::min(room, each->room());
    }
    if (engines.size() > 1) {
        n_rows          = bucket(n_rows);
        const int32_t n = n_rows * (int32_t) engines.size();
        bool          fits = n <= (int32_t) llama_n_ubatch(context.get()) && n_rows <= room;
        for (const engine * each : engines) {
            fits = fits && each->tree_refusal().empty();
        }
        if (fits) {
            context.prepare_trees(n);
        }
        if (!fits || !context.trees()->ready(sequences)) {
            n_rows = 1;
        }
    }
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
        engines[i]->opened((int32_t) i * n_rows, n_rows, took);
    }
}

// the round's rows are there, node 0 in first_row of the batch
void engine::opened(int32_t first_row, int32_t n_rows, int64_t took) {
    sequence_.verified(n_past_, n_rows);
    lost_      = false;
    verify_us_ = took;
    walk_      = { first_row, n_rows, { 0 }, 0, n_past_, /*alive*/ true, /*open*/ true };
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

llama_token engine::next(llama_sampler * sampler) {
    if (!walk_.alive) {
        fail(DW_ERR_STATE, "dw_next without a row to sample; call dw_propose and dw_verify, or dw_eval");
    }
    timer         t(stats_.t_sample_us);
    const int32_t i      = walk_.n_sampled;
    const int32_t node   = walk_.path[i];
    const int32_t n_past = n_past_;
    // taken before it is sampled: a logits processor that saves the state ends the round through on_flush
    walk_.n_sampled = i + 1;
    n_past_         = walk_.pos + i + 1;
    llama_token token;
    try {
        token = sample(sampler, node);
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

// From the target's distribution at a node; where its children were drawn, one of them as often as they may be.
llama_token engine::sample(llama_sampler * sampler, int32_t node) {
    const int32_t row = walk_.first_row + node;
    if (!walk_.open || node >= (int32_t) drawn_.offers.size() || drawn_.offers[node].empty()) {
        return llama_sampler_sample(sampler, sequence_.target(), row);
    }
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
    learn(path);
    walk_.open  = false;
    walk_.alive = false;

    bool whole = false;
    changing([&] { whole = sequence_.keep(tree_, walk_.pos, path); });
    if (!whole) { // somebody cleared or replaced the memory: the round went with it
        forget();
        checkpoints_.clear();
        n_past_ = sequence_.end();
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
    pace_.verified(walk_.n_rows, verify_us_ + took);
}

// how good the draft was; what was not sampled was not refused
void engine::learn(const std::vector<int32_t> & path) {
    const std::vector<int32_t> spine    = tree_.spine();
    int32_t                    n_spine  = 0; // of the path, root included
    const int32_t              n_path   = (int32_t) path.size();
    while (n_spine < std::min(n_path, (int32_t) spine.size()) && path[n_spine] == spine[n_spine]) {
        n_spine++;
    }
    const bool all_judged = !walk_.alive || n_spine < n_path;
    pace_.walked(drafted_by_, all_judged ? (int32_t) spine.size() - 1 : n_path - 1, n_spine - 1);
    if (!walk_.alive && !tree_.is_chain()) {
        pace_.branched(probabilities(tree_, (int32_t) spine.size() - 1), n_path - n_spine);
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

int64_t engine::tree_bytes() const {
    return sequence_.context().trees() ? (int64_t) sequence_.context().trees()->bytes() : 0;
}

dw_stats engine::stats() const {
    dw_stats stats         = stats_;
    stats.n_exact_batches  = sequence_.context().n_exact_batches();
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
    sequence_.context().reset_counters();
}

} // namespace draftwood
