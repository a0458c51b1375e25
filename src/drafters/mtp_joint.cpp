// Drafts of several sequences, a decode for each depth: see drafter.h.

#include "drafters/mtp.h"

#include "llama/facts.h"

#include <cmath>
#include <exception>

namespace draftwood {

// All pairs but the last are fed by themselves: sequences differ in how many wait.
void mtp_drafter::begin_joint(joint_draft & draft) {
    if (!is_ready(draft.request)) {
        draft.result = draft_result::cold;
        return;
    }
    try {
        push_root(draft.request);
        while (queue_.size() > 1) {
            feed(std::min(queue_.size() - 1, n_rows_max_), /*output*/ false);
        }
        draft.result = draft_result::drafted;
    } catch (const std::exception &) {
        reset();
        draft.result = draft_result::failed;
    }
}

void mtp_drafter::draft_all(std::vector<joint_draft> & drafts) {
    std::vector<member> active;
    for (joint_draft & each : drafts) {
        auto & who = static_cast<mtp_drafter &>(*each.who);
        who.begin_joint(each);
        if (each.result == draft_result::drafted) {
            active.push_back({ &who, &each, (int32_t) (&each - drafts.data()), 1.0f });
        }
    }
    const std::vector<member> all      = active;
    const bool                one_kv   = has_unified_kv(ctx_.get());
    const int32_t             n_ubatch = (int32_t) llama_n_ubatch(ctx_.get());
    for (int32_t depth = 0; !active.empty(); ++depth) {
        std::vector<member> next, run;
        for (const member & each : active) {
            // llama.cpp would split a decode there
            const bool ends = !run.empty() && !one_kv && each.who->seq_ != run.back().who->seq_ + 1;
            if (ends || (int32_t) run.size() == n_ubatch) {
                draft_next(std::move(run), depth, next);
                run.clear();
            }
            run.push_back(each);
        }
        draft_next(std::move(run), depth, next);
        active = std::move(next);
    }
    for (const member & each : all) {
        if (each.draft->result == draft_result::drafted) {
            each.who->n_fed_ = ctx_.end(each.who->seq_); // the drafts' pairs stay: see observe
        }
    }
}

// The tokens at this depth, and who goes on. A decode that fails ends its drafts: what they have so far stands.
void mtp_drafter::draft_next(std::vector<member> run, int32_t depth, std::vector<member> & next) {
    if (!decode_joint(run, depth)) {
        for (const member & each : run) {
            if (depth == 0) { // the pair that waits may be in the KV cache, or not
                each.who->reset();
                each.draft->result = draft_result::failed;
            }
        }
        return;
    }
    for (size_t i = 0; i < run.size(); ++i) {
        member &              each    = run[i];
        const draft_request & request = each.draft->request;
        const likeliest       best    = ctx_.best(run.size() == 1 ? -1 : (int32_t) i, each.path, request.p_min);
        if (best.path < request.p_min) {
            continue;
        }
        each.path = best.path;
        each.draft->tree->add(depth, best.token, std::log(each.path));
        if (depth + 1 < request.depth) {
            next.push_back(each);
            next.back().row = run[0].row + (int32_t) i;
        }
    }
}

// A row of each: the pair that waits, or the token drafted last with the block's own hidden state.
bool mtp_drafter::decode_joint(const std::vector<member> & run, int32_t depth) {
    ctx_.batch().clear();
    decode_request request;
    request.slot = drafter_context::slot(graph_kind::joint, run[0].who->seq_);
    for (int32_t i = 0; i < (int32_t) run.size(); ++i) {
        mtp_drafter & own = *run[i].who;
        if (depth == 0) {
            own.add_row(own.queue_.tokens[0], own.queue_.pos, true);
            own.states_.reach();
            request.feeds.push_back(hidden_feed(i, own.states_.waiting(), own.queue_.first, 1));
        } else {
            const joint_draft & draft = *run[i].draft;
            own.add_row(draft.tree->tokens.back(), draft.request.pos + depth, true);
            request.feeds.push_back(hidden_feed(i, shared_->outputs, run[i].row, 1));
        }
    }
    if (ctx_.decode(request) != 0) {
        return false;
    }
    const result_rows hidden = ctx_.newest_results().hidden();
    const int64_t     n      = (int64_t) run.size();
    shared_->outputs.copy(run[0].row, hidden, hidden.tensor ? hidden.tensor->ne[1] - n : 0, n);
    for (const member & each : run) {
        if (depth == 0) {
            each.who->fed(1);
        }
    }
    return true;
}

} // namespace draftwood
