// See drafting.h.

#include "round/drafting.h"

#include "drafters/ngram.h"
#include "llama/decode_request.h"
#include "llama/facts.h"
#include "tree/build.h"
#include "verify/target_context.h"

#include <algorithm>
#include <cmath>

namespace draftwood {

namespace {

// ggml-cuda runs a new graph, captures it the second time, and replays it from then on
constexpr int32_t n_warmup_on_gpu = 2;

constexpr int32_t most_untimed = 31; // drafts; then one is timed, and its round waits for it

constexpr int32_t most_wrong = 6; // then a draft begins behind one verify of 65

} // namespace

drafting::drafting(target_context & target, const llama_context_params & context_params, const dw_params & params,
                   dw_stats & stats) :
    chooses_(params.length == DW_LENGTH_AUTO),
    p_min_(params.draft_p_min),
    tree_budget_(params.tree_budget),
    costs_(target.newest_results().on_gpu() ? n_warmup_on_gpu : 1, /*shares_cores*/ !target.newest_results().on_gpu(),
           target.newest_results().on_gpu() && !experts_are_on_devices(llama_get_model(target.get()))),
    together_(target.shared<batch_model>("times of rounds together",
                                         [&] {
                                             return std::make_shared<batch_model>(
                                                 costs_.n_warmup(), /*shares_cores*/ !target.newest_results().on_gpu());
                                         })),
    drafter_(make_drafter(target, context_params, params)),
    stats_(stats) {
    if ((chooses_ || tree_budget_ > 0) && drafter_ && params.drafter != DW_DRAFTER_NGRAM) {
        ngram_ = std::make_unique<ngram_drafter>();
    }
}

template <typename F> void drafting::each_drafter(F f) {
    for (drafter * d : { drafter_.get(), ngram_.get() }) {
        if (d) {
            f(*d);
        }
    }
}

void drafting::propose(proposal & draft, const draft_limits & limits) {
    carry_out(draft, plan_draft(draft, limits));
}

// Who drafts, how long and how wide: by costs, or as the caller asked.
drafting::plan drafting::plan_draft(proposal & draft, const draft_limits & limits) {
    if (!drafter_ || limits.n_tokens < 1) {
        return {};
    }
    if (chooses_) {
        return plan_best(draft, limits);
    }
    return { request(draft, limits.pos, limits.n_tokens, limits.n_nodes, /*spine*/ 0), {}, token_tree(0), false };
}

// N-grams cost next to nothing, so they are looked up before the choice.
drafting::plan drafting::plan_best(proposal & draft, const draft_limits & limits) {
    int32_t n_max = limits.n_tokens;
    if (tree_budget_ > 0) { // it counts rows, of chains too
        n_max = std::min(n_max, tree_budget_ - 1);
    }
    if (!costs_.shares_cores() || costs_.is_outdated()) {
        costs_.update_curve();
    }
    const token_tree   found  = look_up(draft, limits.pos, n_max);
    const draft_choice choice = costs_.choose({ n_max, found.n_drafts() });
    draft.source              = choice.source;
    stats_.n_paused_rounds += choice.n_tokens == 0 && !choice.is_trial ? 1 : 0;
    if (choice.source == from_ngrams) {
        draft.tree = select(found, choice.n_tokens + 1, choice.n_tokens);
        stats_.n_ngram_rounds++;
        return {};
    }
    const bool    may_branch = !choice.is_trial && limits.n_nodes > choice.n_tokens + 1;
    const int32_t budget     = may_branch && costs_.pays_to_branch(choice) ? limits.n_nodes : 0;
    return { request(draft, limits.pos, choice.n_tokens, budget, choice.n_tokens), choice, found, true };
}

void drafting::carry_out(proposal & draft, const plan & plan) {
    this->draft(draft, plan.request, plan.chosen ? &plan.found : nullptr, /*alone*/ false);
    if (plan.chosen && plan.request.budget > 0) {
        const int32_t n_nodes = costs_.choose_tree_size(plan.choice, beside_spine(draft.tree, plan.choice.n_tokens));
        draft.tree            = select(draft.tree, n_nodes, plan.choice.n_tokens);
    }
}

void drafting::propose_alone(proposal & draft, llama_pos pos, int32_t n_tokens) {
    this->draft(draft, request(draft, pos, n_tokens, /*budget*/ 0, /*spine*/ 0), nullptr, /*alone*/ true);
}

// Lets the drafter go on from the root as requested. N-grams are added to a tree: `found`; nullptr: look them up.
void drafting::draft(proposal & draft, const draft_request & request, const token_tree * found, bool alone) {
    if (request.depth < 1) {
        return;
    }
    draft.draft_start_us = ggml_time_us();
    const bool drafted   = ask(draft, request);
    if (alone || is_timed(request.depth)) {
        settle(draft);
    }
    n_untimed_ = draft.tokens == tokens_at::host ? 0 : n_untimed_ + 1;
    if (request.budget > 0) {
        join_ngrams(draft.tree, found ? *found : look_up(draft, request.pos, request.depth), request.depth);
        draft.tree = select(draft.tree, request.budget, request.spine);
    }
    const bool whole = request.budget == 0 && draft.tree.n_drafts() == request.depth &&
                       draft.tokens == tokens_at::host && !draft.is_begun;
    add_draft_time(draft, request, drafted, ggml_time_us() - draft.draft_start_us, whole);
}

void drafting::add_draft_time(proposal & draft, const draft_request & request, bool drafted, int64_t took, bool whole) {
    stats_.t_draft_us += took;
    if (drafted) {
        costs_.add_draft(request.depth, took, whole);
    }
    draft.by_drafter = drafted;
}

bool drafting::ask(proposal & draft, const draft_request & request) {
    draft_result result = draft_result::failed;
    try {
        result = drafter_->draft(request, draft.tree);
    } catch (const std::exception &) {
        drop_failed(*drafter_, draft.tree);
    }
    return judge(draft, request, result);
}

// Counts what became of a draft, and says whether there is one.
bool drafting::judge(proposal & draft, const draft_request & request, draft_result result) {
    stats_.n_cold_rounds += result == draft_result::cold ? 1 : 0;
    stats_.n_failed_drafts += result == draft_result::failed ? 1 : 0;
    draft.tokens   = request.ahead && draft.tree.n_drafts() > 0 ? tokens_at::device : tokens_at::host;
    draft.is_begun = result == draft_result::begun;
    stats_.n_begun_drafts += draft.is_begun ? 1 : 0;
    if (begun_ == guess::observed) {
        guessed(draft.is_begun);
    }
    begun_ = guess::none;
    return result == draft_result::drafted || result == draft_result::begun;
}

// One that is wrong again and again is made less often.
void drafting::guessed(bool right) {
    n_wrong_     = right ? 0 : std::min(n_wrong_ + 1, most_wrong);
    n_not_begun_ = n_wrong_ > 0 ? 1 << n_wrong_ : 0;
}

void drafting::begin_behind(const proposal & draft, llama_pos pos) {
    if (draft.tokens != tokens_at::verify || !may_begin_ || is_timed(draft.tree.n_drafts())) {
        return;
    }
    const bool greedy = is_greedy() && n_not_begun_ == 0;
    n_not_begun_      = std::max(0, n_not_begun_ - 1);
    try {
        begun_ = drafter_->begin_behind(pos, draft.tree.size(), greedy) ? guess::made : guess::none;
    } catch (const std::exception &) {
        drafter_->reset();
        stats_.n_failed_drafts++;
        may_begin_ = false;
    }
}

// The host cannot see when a draft that stays on its device is done. Costs that decide ask for its time now and then.
bool drafting::is_timed(int32_t n_tokens) const {
    return chooses_ && (n_untimed_ >= most_untimed || costs_.draft_cost(n_tokens) <= 0.0);
}

// If costs decide, a tree only branches off its spine: the curve has no times of wider ones.
draft_request drafting::request(const proposal & draft, llama_pos pos, int32_t depth, int32_t budget,
                                int32_t spine) const {
    const int32_t width = chooses_ ? 1 : max_tree_nodes;
    const bool    ahead = budget == 0 && p_min_ == 0.0f && drafter_->can_draft_ahead();
    return { draft.tree.tokens[0], pos, depth, budget, spine, width, p_min_, temperature_, ahead };
}

// a chain of up to `depth` tokens that n-grams find after the root
token_tree drafting::look_up(const proposal & draft, llama_pos pos, int32_t depth) {
    token_tree found(draft.tree.tokens[0]);
    if (ngram_) {
        ngram_->draft(request(draft, pos, depth, 0, 0), found);
    }
    return found;
}

// Adds up to `depth` tokens of a chain that n-grams found. Each is as probable as such tokens were accepted so far.
void drafting::join_ngrams(token_tree & tree, const token_tree & found, int32_t depth) const {
    token_tree chain = select(found, depth + 1, depth);
    for (int32_t i = 1; i < chain.size(); ++i) {
        chain.log_probs[i] = chain.log_probs[i - 1] + std::log((float) costs_.acceptance(from_ngrams, i - 1));
    }
    merge(tree, chain);
}

// If lengths are not chosen, it says what will be drafted. N-grams cost next to nothing: they draft if as many of their
// tokens are expected to be accepted.
drafting::offer drafting::make_offer(const proposal & draft, const draft_limits & limits) {
    offer   offer;
    int32_t n = drafter_ ? std::max(0, limits.n_tokens) : 0;
    if (n > 0 && chooses_) {
        n                     = tree_budget_ > 0 ? std::min(n, tree_budget_ - 1) : n;
        offer.found           = look_up(draft, limits.pos, n);
        const int32_t n_found = offer.found.n_drafts();
        if (n_found > 0 &&
            costs_.expected_tokens(from_ngrams, n_found) >= costs_.expected_tokens(from_drafter, n_found)) {
            offer.source = from_ngrams;
            n            = n_found;
        }
    } else {
        offer.member.fixed_rows = n > 0 && limits.n_nodes > 0 ? bucket(limits.n_nodes) : n + 1;
    }
    offer.member.by_drafter = offer.source == from_drafter;
    for (int32_t i = 0; i <= n; ++i) {
        offer.member.tokens.push_back(costs_.expected_tokens(offer.source, i));
    }
    return offer;
}

drafting::plan drafting::plan_offered(proposal & draft, const draft_limits & limits, const offer & offer,
                                      int32_t n_tokens) {
    costs_.others_choose();
    draft.source = offer.source;
    stats_.n_paused_rounds += n_tokens == 0 ? 1 : 0;
    if (n_tokens > 0 && draft.source == from_ngrams) {
        draft.tree = select(offer.found, n_tokens + 1, n_tokens);
        stats_.n_ngram_rounds++;
        return {};
    }
    return { request(draft, limits.pos, n_tokens, /*budget*/ 0, /*spine*/ 0), {}, token_tree(0), false };
}

const void * drafting::joint(const plan & plan) const {
    return plan.request.depth > 0 && plan.request.budget == 0 ? drafter_->joint() : nullptr;
}

joint_draft drafting::join(proposal & draft, const plan & plan, llama_seq_id seq, size_t index) const {
    joint_draft joint{ drafter_.get(), seq, plan.request, &draft.tree, draft_result::failed, index };
    joint.request.ahead = false;
    return joint;
}

// The time of one of several is not known.
void drafting::joined(proposal & draft, const joint_draft & made, int64_t took, int32_t n) {
    const bool drafted = judge(draft, made.request, made.result);
    const bool whole   = n == 1 && made.tree->n_drafts() == made.request.depth;
    add_draft_time(draft, made.request, drafted, took, whole);
    stats_.n_joint_rounds += drafted && n > 1 ? 1 : 0;
}

void drafting::settle(proposal & draft) {
    if (draft.tokens != tokens_at::host) {
        drafter_->settle(draft.tree);
        draft.tokens = tokens_at::host;
    }
}

void drafting::feed(proposal & draft, decode_request & verify, int32_t n_rows, bool alone) {
    if (draft.tokens != tokens_at::host && alone && n_rows == draft.tree.size()) {
        drafter_->feed_verify(verify, draft.tree.n_drafts());
        draft.tokens = tokens_at::verify;
    } else {
        settle(draft);
    }
}

int64_t drafting::verify_time(const proposal & draft) const {
    const int32_t n        = draft.tree.n_drafts();
    const int32_t n_left   = n - (draft.is_begun ? drafter_->n_begun() : 0);
    const double  drafting = n_left > 0 ? costs_.draft_cost(n_left) : 0.0;
    const int64_t both     = ggml_time_us() - draft.draft_start_us;
    return costs_.draft_cost(n) > 0.0 ? std::max<int64_t>(1, both - (int64_t) drafting) : 0;
}

// Tokens that were not sampled count neither as accepted nor as refused.
void drafting::learn(const proposal & draft, const std::vector<int32_t> & path, bool ended) {
    const std::vector<int32_t> spine   = draft.tree.spine();
    const int32_t              n_path  = (int32_t) path.size();
    int32_t                    n_spine = 0; // of the path, root included
    while (n_spine < std::min(n_path, (int32_t) spine.size()) && path[n_spine] == spine[n_spine]) {
        n_spine++;
    }
    const bool all_judged = ended || n_spine < n_path;
    costs_.add_acceptance(draft.source, all_judged ? (int32_t) spine.size() - 1 : n_path - 1, n_spine - 1);
    if (ended && !draft.tree.is_chain()) {
        costs_.add_branch_acceptance(beside_spine(draft.tree, (int32_t) spine.size() - 1), n_path - n_spine);
    }
}

void drafting::add_round_time(const proposal & draft, int32_t n_rows, int64_t us) {
    costs_.add_round(draft.by_drafter, n_rows, us);
}

void drafting::observe(const kept_rows & kept) {
    costs_.add_tokens(kept.n);
    begun_ = begun_ == guess::made && !kept.is_prompt ? guess::observed : guess::none;
    if (kept.is_prompt) {
        costs_.begin_text();
    }
    each_drafter([&](drafter & d) {
        try {
            d.observe(kept);
        } catch (const std::exception &) {
            d.reset();
            stats_.n_failed_drafts++;
        }
    });
}

void drafting::trim(llama_pos n_keep) {
    begun_ = guess::none;
    each_drafter([&](drafter & d) { d.trim(n_keep); });
}

void drafting::reset() {
    begun_ = guess::none;
    each_drafter([](drafter & d) { d.reset(); });
}

std::vector<float> drafting::mark(llama_pos pos) const {
    return drafter_ ? drafter_->mark(pos) : std::vector<float>{};
}

void drafting::resume(llama_pos pos, const std::vector<float> & mark) {
    if (drafter_) {
        drafter_->resume(pos, mark);
    }
}

} // namespace draftwood
