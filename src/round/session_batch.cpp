// Proposals of several sequences of a context: see session.h.

#include "round/session.h"
#include "round/verify_batch.h"

#include <algorithm>

namespace draftwood {

void session::propose_all(const std::vector<session *> & all, const llama_token * last, const int32_t * wanted) {
    for (size_t i = 0; i < all.size(); ++i) {
        if (&all[i]->sequence_.context() != &all[0]->sequence_.context() ||
            std::count(all.begin(), all.end(), all[i]) != 1) {
            fail(DW_ERR_ARGUMENT, "expected engines of one llama_context, each once");
        }
        all[i]->sequence_.require_tokens(&last[i], 1);
        all[i]->require_known("a round");
    }
    for (session * each : all) { // then cells are free that their open rounds hold
        each->commit();
    }
    for (session * each : all) {
        each->require_whole("a round");
    }
    std::vector<drafting::asked> asked;
    for (size_t i = 0; i < all.size(); ++i) {
        session & each = *all[i];
        each.start(last[i]);
        asked.push_back({ &each.drafting_,
                          each.sequence_.id(),
                          &each.round_.draft(),
                          { each.n_past_, std::min(wanted[i], each.max_draft()), each.max_nodes() } });
    }
    std::sort(asked.begin(), asked.end(), [](const auto & a, const auto & b) { return a.seq < b.seq; });
    std::vector<drafting::offer> offers;
    if (all.size() > 1 && std::any_of(all.begin(), all.end(), [](session * s) { return s->drafting_.chooses(); })) {
        for (const drafting::asked & each : asked) {
            offers.push_back(each.who->make_offer(*each.draft, each.limits));
        }
        choose_lengths(verify_batch(all), offers, asked);
    }
    drafting::propose_all(asked);
}

// `offers` and `asked` are in the order of the batch.
void session::choose_lengths(const verify_batch & batch, const std::vector<drafting::offer> & offers,
                             std::vector<drafting::asked> & asked) {
    std::vector<batch_model::member> members;
    for (const drafting::offer & each : offers) {
        members.push_back(each.member);
    }
    const auto                 time   = [&](const std::vector<int32_t> & rows) { return batch.expected_time(rows); };
    const std::vector<int32_t> chosen = batch.together().choose(members, time, batch.solo());
    for (size_t i = 0; i < asked.size(); ++i) {
        if (asked[i].who->chooses()) {
            asked[i].offered  = &offers[i];
            asked[i].n_tokens = chosen[i];
        }
    }
}

} // namespace draftwood
