// See verify_batch.h.

#include "round/verify_batch.h"

#include "llama/facts.h"

#include <algorithm>
#include <set>

namespace draftwood {

verify_batch::verify_batch(std::vector<session *> sessions) :
    sessions_(std::move(sessions)) {
    const auto by_sequence = [](const session * a, const session * b) {
        return a->sequence().id() < b->sequence().id();
    };
    std::sort(sessions_.begin(), sessions_.end(), by_sequence);
    for (size_t i = 0; i < sessions_.size(); ++i) {
        const session & each = *sessions_[i];
        if (!each.is_proposed()) {
            fail(DW_ERR_STATE, "dw_verify without a dw_propose before it");
        }
        each.require_whole("a verify");
        if (&each.sequence().context() != &context() || (i > 0 && sessions_[i] == sessions_[i - 1])) {
            fail(DW_ERR_ARGUMENT, "expected engines of one llama_context, each once");
        }
    }
}

void verify_batch::run() {
    if (alone() && take_step()) {
        return;
    }
    waits_for_step_ = context().has_step();
    context().drop_step();
    const int32_t most = std::max(1, max_outputs(context().get()) / (int32_t) sessions_.size());
    for (session * each : sessions_) {
        each->drop_stale_draft();
        if (each->tree().size() > most) { // all rows of a verify have results
            each->shorten_draft(most);
        }
    }
    while (!attempt()) {
        for (session * each : sessions_) {
            each->shorten_draft(context().row_limit());
        }
    }
}

// A step that was queued behind the last one is this verify if its token was guessed right.
bool verify_batch::take_step() {
    session &     only     = *sessions_[0];
    const int64_t start_us = ggml_time_us();
    if (!only.take_step()) {
        return false;
    }
    only.verify_begins();
    const int64_t us = finish();
    only.verified({ 0, 1, nullptr, ggml_time_us() - start_us, us, /*is_alone*/ true });
    return true;
}

// Waits for the rows, after the next step is queued where one can be. Sampling waits anyway, and here the time is
// known. Returns that of a step that was queued, as wait_for_rows() does.
int64_t verify_batch::finish() {
    if (alone() && sessions_[0]->can_queue_step()) {
        sessions_[0]->queue_step();
    }
    return context().wait_for_rows();
}

// Most rows that each sequence may have: all share n_batch, and the cells of a unified cache.
int32_t verify_batch::rows_that_fit() const {
    int32_t room = INT32_MAX;
    for (const session * each : sessions_) {
        room = std::min(room, each->room());
    }
    const auto    n        = (int32_t) sessions_.size();
    const int32_t of_cache = has_unified_kv(context().get()) ? room / n : room;
    const int32_t of_batch = std::min((int32_t) llama_n_batch(context().get()), max_outputs(context().get())) / n;
    return std::max(1, std::min({ of_cache, of_batch, context().row_limit(n) }));
}

// Whether a group's graph can hold one more. Where each sequence has a stream of the KV cache, llama.cpp's attention
// reads streams that follow each other.
bool verify_batch::can_join(const group & group, const session & next, bool checks_states) const {
    const auto n = (int32_t) group.members.size() + 1;
    if (n * group.n_rows > std::min((int32_t) llama_n_ubatch(context().get()), context().row_limit())) {
        return false;
    }
    const llama_seq_id last = group.members.back()->sequence().id();
    if (!has_unified_kv(context().get()) && next.sequence().id() != last + 1) {
        return false;
    }
    if (!checks_states || !group.on_trees) {
        return true;
    }
    std::vector<llama_seq_id> sequences;
    for (const session * each : group.members) {
        sequences.push_back(each->sequence().id());
    }
    sequences.push_back(next.sequence().id());
    return context().trees()->ready(sequences);
}

const cost_model & verify_batch::solo() const {
    for (const session * each : sessions_) {
        if (each->drafting().costs().verify_cost(1) > 0.0) {
            return each->drafting().costs();
        }
    }
    return sessions_[0]->drafting().costs();
}

verify_batch::duration verify_batch::time_of(const std::vector<group> & groups) const {
    duration sum{ 0.0, 0.0 };
    bool     is_known = true;
    for (const group & each : groups) {
        const auto   n  = (int32_t) each.members.size();
        const double us = together().verify(n, each.n_rows, solo());
        is_known        = is_known && us > 0.0;
        sum.micros += us;
        sum.rows += n * each.n_rows + together().graph_rows();
    }
    return { is_known ? sum.micros : 0.0, sum.rows };
}

double verify_batch::expected_time(const std::vector<int32_t> & rows) const {
    return time_of(fastest_layout(rows, /*checks_states*/ false)).micros;
}

// Sessions with up to most_of_small rows share a number of rows, the others another. The larger one comes first: if
// there is no memory for its graph, no plain step of others was decoded yet.
std::vector<verify_batch::group> verify_batch::lay_out(const std::vector<int32_t> & rows, int32_t most_of_small,
                                                       bool checks_states) const {
    std::vector<group> groups;
    const auto         add = [&](bool trees, bool small) {
        const size_t first  = groups.size();
        int32_t      n_rows = 1;
        for (size_t i = 0; trees && i < rows.size(); ++i) {
            const bool here = sessions_[i]->verifies_trees() && (rows[i] <= most_of_small) == small;
            n_rows          = here ? std::max(n_rows, rows[i]) : n_rows;
        }
        for (size_t i = 0; i < rows.size(); ++i) {
            const bool on_trees = sessions_[i]->verifies_trees();
            if (on_trees != trees || (trees && (rows[i] <= most_of_small) != small)) {
                continue;
            }
            if (groups.size() == first || !can_join(groups.back(), *sessions_[i], checks_states)) {
                groups.push_back({ {}, n_rows, n_rows > 1 });
            }
            groups.back().members.push_back(sessions_[i]);
        }
    };
    add(/*trees*/ true, /*small*/ false);
    add(/*trees*/ true, /*small*/ true);
    add(/*trees*/ false, /*small*/ true);
    return groups;
}

// Padding costs rows, and another graph reads the weights again.
std::vector<verify_batch::group> verify_batch::fastest_layout(const std::vector<int32_t> & rows,
                                                              bool                         checks_states) const {
    std::set<int32_t> sizes(rows.begin(), rows.end());
    sizes.erase(*sizes.rbegin());
    std::vector<group> best = lay_out(rows, 0, checks_states);
    duration           time = time_of(best);
    for (const int32_t size : sizes) {
        std::vector<group> here = lay_out(rows, size, checks_states);
        const duration     its  = time_of(here);
        const bool         both = its.micros > 0.0 && time.micros > 0.0;
        if (both ? its.micros < time.micros : its.rows < time.rows) {
            best = std::move(here);
            time = its;
        }
    }
    return best;
}

std::vector<verify_batch::group> verify_batch::plan() const {
    const int32_t        fits = alone() ? sessions_[0]->room() : rows_that_fit();
    std::vector<int32_t> rows;
    for (const session * each : sessions_) {
        rows.push_back(each->sequence().rows_of(each->tree(), fits));
    }
    const int32_t most = *std::max_element(rows.begin(), rows.end());
    if (alone() || most == 1) {
        return { { sessions_, most, most > 1 && sessions_[0]->verifies_trees() } };
    }
    return fastest_layout(rows, /*checks_states*/ true);
}

// plan(), with a tree state for each group on trees. Making one settles open rounds. If there is no memory for a
// group's, its members take a plain step.
std::vector<verify_batch::group> verify_batch::plan_with_room() {
    for (;;) {
        std::vector<group> groups = plan();
        size_t             i      = 0;
        while (i < groups.size() && groups[i].on_trees && !alone() &&
               context().grow_trees(groups[i].n_rows * (int32_t) groups[i].members.size(), i)) {
            ++i;
        }
        if (alone() || i == groups.size() || !groups[i].on_trees) {
            return groups;
        }
        for (session * each : groups[i].members) {
            each->shorten_draft(1);
        }
    }
}

// Returns false if there was no memory for so many rows. The context is as before, with a lower row_limit().
bool verify_batch::attempt() {
    if (!alone()) {
        const int32_t fits = rows_that_fit();
        for (session * each : sessions_) {
            each->shorten_draft(each->verifies_trees() ? fits : 1);
        }
    }
    const std::vector<group>  groups = plan_with_room();
    std::vector<verify_group> to_verify;
    for (const group & each : groups) {
        to_verify.push_back({ {}, each.n_rows, each.on_trees });
        for (session * member : each.members) {
            to_verify.back().members.push_back({ member->sequence().id(), &member->tree(), member->n_past() });
            member->verify_begins();
        }
    }
    context().forget_failure();
    const int64_t start_us = ggml_time_us();
    try {
        decode_request request;
        for (const group & group : groups) {
            for (session * each : group.members) {
                each->feed_draft(request, group.n_rows, alone());
            }
        }
        context().verify(to_verify, std::move(request));
    } catch (const failure & e) {
        if (failed(e.code(), groups)) {
            return false;
        }
        throw failure(e.code() == DW_ERR_MEMORY ? DW_ERR_DECODE : e.code(), e.what()); // DW_ERR_MEMORY: a drafter's
    } catch (const std::exception &) {
        failed(DW_ERR_INTERNAL, groups);
        throw;
    }
    if (alone()) {
        sessions_[0]->begin_draft();
    }
    finish();
    verified(groups, ggml_time_us() - start_us);
    return true;
}

void verify_batch::verified(const std::vector<group> & groups, int64_t took) {
    const bool is_typical = context().took(took) && !waits_for_step_;
    if (is_typical && !alone()) {
        learn(groups, took);
    }
    int32_t first_row = 0;
    for (size_t i = 0; i < groups.size(); ++i) {
        tree_state * committer = groups[i].on_trees ? context().trees(i) : nullptr;
        for (session * each : groups[i].members) {
            each->verified(
                { first_row, groups[i].n_rows, committer, took, is_typical && alone() ? took : 0, !waits_for_step_ });
            first_row += groups[i].n_rows;
        }
    }
}

// Of several graphs only the sum is known. It is divided among them as their expected times are.
void verify_batch::learn(const std::vector<group> & groups, int64_t took) {
    const duration all = time_of(groups);
    for (const group & each : groups) {
        const duration here = time_of({ each });
        const double   part = all.micros > 0.0 ? here.micros / all.micros : here.rows / all.rows;
        together().add_verify((int32_t) each.members.size(), each.n_rows, part * (double) took);
    }
}

// True if fewer rows may do.
bool verify_batch::failed(dw_status code, const std::vector<group> & groups) {
    int32_t n_rows = 1, n_all = 1; // of the largest graph
    for (const group & each : groups) {
        n_rows = std::max(n_rows, each.n_rows);
        n_all  = std::max(n_all, each.n_rows * (int32_t) each.members.size());
    }
    const bool intact = context().intact();
    const bool again  = code == DW_ERR_MEMORY && n_rows > 1 && intact;
    for (session * each : sessions_) {
        each->verify_failed(intact, again);
    }
    if (again) {
        context().limit_rows(n_all);
    }
    return again;
}

} // namespace draftwood
