// Blocks of several sequences in one decode: see drafter.h.

#include "drafters/dflash.h"
#include "llama/facts.h"
#include "llama/memory.h"

#include <algorithm>
#include <exception>

namespace draftwood {

// Calls decode() for blocks that one decode can hold, as many rows each. Without a unified cache llama.cpp takes
// sequences that follow each other.
template <typename F> void dflash_drafter::in_runs(std::vector<block> blocks, F decode) {
    std::stable_sort(blocks.begin(), blocks.end(), [](const block & a, const block & b) { return a.n < b.n; });
    std::vector<block> run;
    for (const block & each : blocks) {
        drafter_context & ctx    = each.who->ctx_;
        const bool        one_kv = has_unified_kv(ctx.get());
        const auto        n      = (int32_t) run.size() + 1;
        const int32_t     n_rows = n * (each.n + 1);
        const int32_t     most   = std::min((int32_t) llama_n_ubatch(ctx.get()), max_tree_nodes); // and n_outputs_max
        const bool        fits   = n_rows <= most && (!one_kv || n_rows <= free_cells(ctx.get(), each.who->seq_));
        if (!run.empty() && (run[0].n != each.n || !fits || (!one_kv && run.back().who->seq_ + 1 != each.who->seq_))) {
            decode(run);
            run.clear();
        }
        run.push_back(each);
    }
    if (!run.empty()) {
        decode(run);
    }
}

void dflash_drafter::draft_all(std::vector<joint_draft> & drafts) {
    std::vector<block> blocks, waiting;
    for (joint_draft & each : drafts) {
        auto &        who = static_cast<dflash_drafter &>(*each.who);
        const int32_t n   = who.guesses(each.request);
        each.result       = n > 0 ? draft_result::drafted : draft_result::cold;
        if (n > 0) {
            blocks.push_back({ &who, &each, n });
        }
        if (n > 0 && who.n_waiting_ > 0) {
            const int32_t n_rows = who.n_waiting_ <= max_tree_nodes ? bucket(who.n_waiting_) : max_tree_nodes;
            waiting.push_back({ &who, &each, n_rows - 1 });
        }
    }
    in_runs(std::move(waiting), feed_together);
    const auto failed = [](const block & each) { return each.draft->result == draft_result::failed; };
    blocks.erase(std::remove_if(blocks.begin(), blocks.end(), failed), blocks.end());
    in_runs(std::move(blocks), draft_together);
}

// As feed() does for one. Who is alone, or has much to take, feeds itself.
void dflash_drafter::feed_together(const std::vector<block> & run) {
    try {
        drafter_context & ctx    = run[0].who->ctx_;
        const int32_t     n_rows = run[0].n + 1;
        const bool        fits   = std::all_of(run.begin(), run.end(), [&](const block & each) {
            return each.who->n_waiting_ <= n_rows && each.who->n_fed_ + n_rows <= ctx.n_positions();
        });
        if (run.size() == 1 || !fits) {
            std::for_each(run.begin(), run.end(), [](const block & each) { each.who->feed(); });
            return;
        }
        decode_request request;
        request.slot = drafter_context::slot(graph_kind::joint_features, run[0].who->seq_);
        ctx.batch().clear();
        for (const block & each : run) {
            dflash_drafter & who = *each.who;
            who.add_features(request, /*first*/ 0, who.n_waiting_, n_rows, /*output*/ true);
        }
        const int32_t rc = ctx.decode(request);
        if (rc != 0) {
            fail(DW_ERR_DECODE, "llama_decode returned %d for the features of %zu sequences", rc, run.size());
        }
        for (const block & each : run) {
            each.who->n_fed_ += each.who->n_waiting_;
            each.who->ctx_.remove_from(each.who->seq_, each.who->n_fed_);
            each.who->fed();
        }
    } catch (const std::exception &) {
        for (const block & each : run) {
            each.who->reset();
            each.draft->result = draft_result::failed;
        }
    }
}

void dflash_drafter::draft_together(const std::vector<block> & run) {
    drafter_context & ctx = run[0].who->ctx_;
    ctx.batch().clear();
    for (const block & each : run) {
        each.who->add_block(each.draft->request, each.n);
    }
    decode_request request;
    request.slot =
        drafter_context::slot(run.size() > 1 ? graph_kind::joint_blocks : graph_kind::own_block, run[0].who->seq_);
    const bool decoded = ctx.decode(request) == 0;
    for (size_t i = 0; i < run.size(); ++i) {
        const block & each = run[i];
        if (decoded) {
            each.who->read_chain(each.draft->request, each.n, (int32_t) i * (each.n + 1), *each.draft->tree);
        }
        ctx.remove_from(each.who->seq_, each.draft->request.pos);
        each.draft->result = decoded ? draft_result::drafted : draft_result::failed;
    }
}

} // namespace draftwood
