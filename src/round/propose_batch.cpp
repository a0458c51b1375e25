// See propose_batch.h.

#include "round/propose_batch.h"

#include "round/verify_batch.h"

#include <algorithm>
#include <map>

namespace draftwood {

propose_batch::propose_batch(const std::vector<session *> & sessions, const llama_token * last,
                             const int32_t * wanted) {
    for (size_t i = 0; i < sessions.size(); ++i) {
        const session & each = *sessions[i];
        if (&each.sequence().context() != &sessions[0]->sequence().context() ||
            std::count(sessions.begin(), sessions.end(), sessions[i]) != 1) {
            fail(DW_ERR_ARGUMENT, "expected engines of one llama_context, each once");
        }
        each.sequence().require_tokens(&last[i], 1);
        each.require_known("a round");
        members_.push_back({ sessions[i], last[i], wanted[i] });
    }
    const auto by_sequence = [](const member & a, const member & b) {
        return a.who->sequence().id() < b.who->sequence().id();
    };
    std::sort(members_.begin(), members_.end(), by_sequence);
}

void propose_batch::run() {
    try {
        begin_rounds();
        choose_lengths();
        draft();
    } catch (...) { // nobody has a new proposal then; what was proposed before stays
        for (const member & each : members_) {
            if (each.has_begun) {
                each.who->drop_proposal();
            }
        }
        throw;
    }
}

void propose_batch::begin_rounds() {
    for (const member & each : members_) { // then cells are free that their open rounds hold
        each.who->commit();
    }
    for (const member & each : members_) { // a commit may have failed
        each.who->require_known("a round");
        each.who->require_whole("a round");
    }
    for (member & each : members_) {
        each.has_begun = true;
        each.who->begin_round(each.last);
        each.limits = each.who->limits(each.wanted, (int32_t) members_.size());
    }
}

// One session alone chooses by its own costs, in its plan.
void propose_batch::choose_lengths() {
    const auto chooses = [](const member & each) { return each.who->drafting().chooses(); };
    if (members_.size() == 1 || std::none_of(members_.begin(), members_.end(), chooses)) {
        return;
    }
    std::vector<session *>           sessions;
    std::vector<batch_model::member> offers;
    for (member & each : members_) {
        each.offer = each.who->drafting().make_offer(each.who->draft(), each.limits);
        sessions.push_back(each.who);
        offers.push_back(each.offer.member);
    }
    const verify_batch         batch(sessions);
    const auto                 time   = [&](const std::vector<int32_t> & rows) { return batch.expected_time(rows); };
    const std::vector<int32_t> chosen = batch.together().choose(offers, time, batch.solo());
    for (size_t i = 0; i < members_.size(); ++i) {
        members_[i].is_chosen = chooses(members_[i]);
        members_[i].n_tokens  = chosen[i];
    }
}

// Drafts that cannot be made together come first, one by one. The others follow, those of a shared context at once.
void propose_batch::draft() {
    std::map<const void *, std::vector<joint_draft>> groups;
    for (size_t i = 0; i < members_.size(); ++i) {
        const member &       each = members_[i];
        drafting &           by   = each.who->drafting();
        proposal &           its  = each.who->draft();
        const drafting::plan plan = each.is_chosen ? by.plan_offered(its, each.limits, each.offer, each.n_tokens)
                                                   : by.plan_draft(its, each.limits);
        if (const void * joint = by.joint(plan)) {
            groups[joint].push_back(by.join(its, plan, each.who->sequence().id(), i));
        } else {
            by.carry_out(its, plan);
        }
    }
    for (auto & [joint, drafts] : groups) {
        draft_together(drafts);
    }
}

void propose_batch::draft_together(std::vector<joint_draft> & drafts) {
    const int64_t start_us = ggml_time_us();
    try {
        drafts[0].who->draft_all(drafts);
    } catch (const std::exception &) {
        for (joint_draft & each : drafts) {
            drop_failed(*each.who, *each.tree);
            each.result = draft_result::failed;
        }
    }
    const auto    n       = (int32_t) drafts.size();
    const int64_t took    = (ggml_time_us() - start_us) / n; // of each
    int32_t       longest = 0;
    for (const joint_draft & each : drafts) {
        session & who = *members_[each.index].who;
        longest       = std::max(longest, each.tree->n_drafts());
        who.drafting().joined(who.draft(), each, took, n);
    }
    if (longest > 0 && n > 1) {
        members_[drafts[0].index].who->drafting().together().add_draft(n, longest, (double) took * n);
    }
}

} // namespace draftwood
