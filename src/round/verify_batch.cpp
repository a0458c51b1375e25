// See verify_batch.h.

#include "round/verify_batch.h"

#include "llama/facts.h"

#include <algorithm>

namespace draftwood {

verify_batch::verify_batch(std::vector<session *> sessions) :
    sessions_(std::move(sessions)) {
    const auto by_sequence = [](const session * a, const session * b) { return a->target().id() < b->target().id(); };
    std::sort(sessions_.begin(), sessions_.end(), by_sequence);
    for (size_t i = 0; i < sessions_.size(); ++i) {
        const session & each = *sessions_[i];
        if (!each.is_proposed()) {
            fail(DW_ERR_STATE, "dw_verify without a dw_propose before it");
        }
        each.require_whole("a verify");
        if (&each.target().context() != &context() || (i > 0 && sessions_[i] == sessions_[i - 1])) {
            fail(DW_ERR_ARGUMENT, "expected engines of one llama_context, each once");
        }
    }
}

void verify_batch::run() {
    for (session * each : sessions_) {
        each->drop_stale_draft();
    }
    while (!attempt()) {
        for (session * each : sessions_) {
            each->shorten_draft(context().row_limit());
        }
    }
}

// Rows of each sequence in one ubatch: as many as the largest tree's. 1 if one has no room for them, or llama.cpp would
// split the decode: all take a plain step then.
int32_t verify_batch::rows_wanted() const {
    int32_t n_rows = 1, room = INT32_MAX;
    bool    trees = true;
    for (const session * each : sessions_) {
        n_rows = std::max(n_rows, each->target().rows_of(each->tree(), each->room()));
        room   = std::min(room, each->room());
        trees  = trees && each->tree_refusal().empty();
    }
    if (alone()) {
        return n_rows;
    }
    n_rows                   = bucket(n_rows);
    const int32_t n          = n_rows * (int32_t) sessions_.size();
    const int32_t n_of_cache = has_unified_kv(context().get()) ? n : n_rows;
    const int32_t most       = std::min((int32_t) llama_n_ubatch(context().get()), context().row_limit());
    return trees && n_of_cache <= room && n <= most ? n_rows : 1;
}

// Makes a tree state for the rows of several sequences, which settles open rounds. Returns the rows that each may have:
// 1 if there is no memory for more, or llama.cpp would copy states.
int32_t verify_batch::make_room(int32_t n_rows) {
    if (alone() || n_rows == 1) {
        return n_rows;
    }
    const int32_t             n = n_rows * (int32_t) sessions_.size();
    std::vector<llama_seq_id> sequences;
    for (const session * each : sessions_) {
        sequences.push_back(each->target().id());
    }
    return context().grow_trees(n) && context().trees()->ready(sequences) ? n_rows : 1;
}

// False where there was no memory for so many rows: the context is as before, and may have fewer from now on.
bool verify_batch::attempt() {
    const int32_t             n_rows   = make_room(rows_wanted());
    bool                      on_trees = true;
    std::vector<planned_tree> members;
    for (session * each : sessions_) {
        if (n_rows == 1) {
            each->shorten_draft(1);
        }
        members.push_back({ each->target().id(), &each->tree(), each->n_past() });
        on_trees = on_trees && each->tree_refusal().empty();
        each->verify_begins();
    }
    context().forget_failure();
    const int64_t start_us = ggml_time_us();
    try {
        decode_request request;
        for (session * each : sessions_) {
            each->feed_draft(request, n_rows, alone());
        }
        context().verify(members, n_rows, on_trees, std::move(request));
    } catch (const failure & e) {
        if (failed(e.code(), n_rows)) {
            return false;
        }
        throw failure(e.code() == DW_ERR_MEMORY ? DW_ERR_DECODE : e.code(), e.what()); // DW_ERR_MEMORY: a drafter's
    } catch (const std::exception &) {
        failed(DW_ERR_INTERNAL, n_rows);
        throw;
    }
    llama_synchronize(context().get()); // sampling waits for it anyway, and here its time is known
    const int64_t took       = ggml_time_us() - start_us;
    const bool    is_typical = context().took(took) && alone();
    for (size_t i = 0; i < sessions_.size(); ++i) {
        sessions_[i]->verified((int32_t) i * n_rows, n_rows, took, is_typical);
    }
    return true;
}

// True if fewer rows may do.
bool verify_batch::failed(dw_status code, int32_t n_rows) {
    const bool intact = context().intact();
    const bool again  = code == DW_ERR_MEMORY && n_rows > 1 && intact;
    for (session * each : sessions_) {
        each->verify_failed(intact, again);
    }
    if (again) {
        context().limit_rows(n_rows * (int32_t) sessions_.size());
    }
    return again;
}

} // namespace draftwood
