// Drafts of several sequences of a context: see drafting.h.

#include "round/drafting.h"
#include "tree/build.h"

#include <algorithm>
#include <map>

namespace draftwood {

// Drafts that cannot be made together come first, one by one. The others follow, those of a shared context at once.
void drafting::propose_all(const std::vector<asked> & all) {
    std::map<const void *, std::vector<joint_draft>> groups;
    for (const asked & each : all) {
        plan plan = each.offered ? each.who->plan_offered(each) : each.who->plan_draft(*each.draft, each.limits);
        const void * joint = plan.request.depth > 0 ? each.who->drafter_->joint() : nullptr;
        if (!joint || plan.request.budget > 0) {
            each.who->carry_out(*each.draft, plan);
            continue;
        }
        plan.request.ahead = false;
        groups[joint].push_back({ each.who->drafter_.get(), each.seq, plan.request, &each.draft->tree,
                                  draft_result::failed, (size_t) (&each - all.data()) });
    }
    for (auto & [joint, drafts] : groups) {
        draft_together(all, drafts);
    }
}

void drafting::draft_together(const std::vector<asked> & all, std::vector<joint_draft> & drafts) {
    const int64_t start_us = ggml_time_us();
    int32_t       longest  = 0;
    try {
        drafts[0].who->draft_all(drafts);
    } catch (const std::exception &) {
        for (joint_draft & each : drafts) {
            drop_failed(*each.who, *each.tree);
            each.result = draft_result::failed;
        }
    }
    const int64_t took = (ggml_time_us() - start_us) / (int64_t) drafts.size();
    for (const joint_draft & each : drafts) {
        longest                  = std::max(longest, each.tree->n_drafts());
        const asked & by         = all[each.index];
        by.draft->draft_start_us = start_us;
        const bool drafted       = by.who->judge(*by.draft, each.request, each.result);
        // where several take part, its own time is not known
        const bool whole = drafts.size() == 1 && each.tree->n_drafts() == each.request.depth;
        by.who->add_draft_time(*by.draft, each.request, drafted, took, whole);
        by.who->stats_.n_joint_rounds += drafted && drafts.size() > 1 ? 1 : 0;
    }
    if (longest > 0 && drafts.size() > 1) {
        all[drafts[0].index].who->together_->add_draft((int32_t) drafts.size(), longest, (double) took * drafts.size());
    }
}

// Where lengths are not chosen, what will be drafted. n-grams cost next to nothing: they draft if they are as likely to
// be right.
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

drafting::plan drafting::plan_offered(const asked & asked) {
    proposal & draft = *asked.draft;
    draft.source     = asked.offered->source;
    stats_.n_paused_rounds += asked.n_tokens == 0 ? 1 : 0;
    if (asked.n_tokens > 0 && draft.source == from_ngrams) {
        draft.tree = select(asked.offered->found, asked.n_tokens + 1, asked.n_tokens);
        stats_.n_ngram_rounds++;
        return {};
    }
    return { request(draft, asked.limits.pos, asked.n_tokens, /*budget*/ 0, /*spine*/ 0), {}, token_tree(0), false };
}

} // namespace draftwood
