// Decodes in a target's context: verifies, and what a failure leaves. See target_context.h.

#include "llama/decode.h"
#include "llama/facts.h"
#include "llama/graph_store.h"
#include "verify/target_context.h"

#include <algorithm>

namespace draftwood {

// llama_decode's return value; -3 and `why` where it threw.
int32_t target_context::run_batch(const decode_request & request, const std::function<void()> & begin,
                                  std::string & why) {
    try {
        begin();
        return working([&] { return draftwood::decode(attached_, request, batch_); });
    } catch (const std::bad_alloc &) {
        return -2; // as llama_decode says it
    } catch (const std::exception & e) {
        why = e.what();
        return -3;
    }
}

// The memory is as before if llama.cpp found no room for the rows (1). After other failures it goes back to the marks
// if nothing was computed that changes states.
int32_t target_context::attempt(const memory_marks & marks, const decode_request & request,
                                const std::function<void()> & begin, std::string & why) {
    attached_.outputs.n_ubatches = 0; // of this one
    const int32_t rc             = run_batch(request, begin, why);
    intact_                      = rc == 0 || rc == 1 || (marks.can_restore() && leaves_states_alone(request));
    if (rc != 0 && marks.can_restore() && intact_) {
        marks.restore();
    }
    return rc;
}

void target_context::decode(const std::vector<place> & places, int32_t n_rows, const decode_request & request,
                            const std::function<void()> & begin) {
    drop_step();
    bring_state_back();
    settle_all_but(places);
    results_.forget();
    rows_came_us_ = 0;
    slot_         = request.slot;
    if (steps_fail_) {
        drop_place_of_steps();
    }
    const memory_marks marks(target_, places);
    const bool         was_short = short_of_memory();
    std::string        why;
    int32_t            rc = attempt(marks, request, begin, why);
    if (rc == -2 && intact_ && !was_short) {
        rc = attempt(marks, request, begin, why); // now in the context's own graph (graph_store.h)
    }
    require_decoded(rc, places[0].pos, n_rows, why);
    results_.decoded(/*is_read*/ true);
}

void target_context::require_decoded(int32_t rc, llama_pos pos, int32_t n_rows, const std::string & why) const {
    if (rc == 1) {
        fail(DW_ERR_CONTEXT, "llama_decode returned 1: no room for %d tokens at position %d of a context of %u tokens",
             n_rows, pos, llama_n_ctx_seq(target_));
    }
    if (rc == -2) {
        fail(DW_ERR_MEMORY, "llama_decode returned -2: no memory for the graph of %d tokens at position %d", n_rows,
             pos);
    }
    if (rc != 0) {
        fail(DW_ERR_DECODE, "llama_decode returned %d for %d tokens at position %d; expected 0 %s", rc, n_rows, pos,
             why.c_str());
    }
}

// Whether all graphs that a failed decode computed were verifies on tree states, or its memory is a fork: these leave
// states alone.
bool target_context::leaves_states_alone(const decode_request & request) const {
    const auto is_plain = [](const decode_part & part) { return part.verify == nullptr; };
    const auto n        = (size_t) attached_.outputs.n_ubatches;
    return n == 0 || request.fork ||
           (n <= request.parts.size() && std::none_of(request.parts.begin(), request.parts.begin() + n, is_plain));
}

std::vector<place> target_context::add_rows(const std::vector<verify_group> & groups) {
    std::vector<place> places;
    batch_.clear();
    for (const verify_group & group : groups) {
        for (const planned_tree & each : group.members) {
            places.push_back({ each.seq, each.pos });
            for (int32_t i = 0; i < group.n_rows; ++i) {
                const int32_t node = std::min(i, each.tree->size() - 1);
                batch_.add(each.tree->tokens[node], each.pos + each.tree->depths[node], true, each.seq);
            }
        }
    }
    return places;
}

void target_context::verify(const std::vector<verify_group> & groups, decode_request request) {
    const std::vector<place> places = add_rows(groups);
    int32_t                  n      = 0;
    for (size_t i = 0; i < groups.size(); ++i) {
        tree_state *  state = groups[i].on_trees ? trees(i) : nullptr;
        const int32_t here  = groups[i].n_all_rows();
        if (groups[i].on_trees && (!state || here > state->max_rows())) {
            fail(DW_ERR_INTERNAL, "a verify of %d rows; the engine made room for %d", here,
                 state ? state->max_rows() : 0);
        }
        if (state || groups.size() > 1) {
            request.parts.push_back({ here, state });
        }
        n += here;
    }
    is_timed_    = groups.size() == 1 && chooses_threads(n);
    verified_on_ = is_timed_ ? threads_.choose(n) : n_threads_batch;
    if (verified_on_ == n_threads) {
        request.n_threads = llama_n_threads(target_);
    }
    decode(places, n, request, [&] {
        for (size_t i = 0; i < groups.size(); ++i) {
            if (groups[i].on_trees) {
                trees(i)->begin(groups[i].members, groups[i].n_rows, attached_.exact_rows > 0);
            }
        }
    });
}

// Not if the results come from a GPU: the CPU then has little to do.
bool target_context::chooses_threads(int32_t n_rows) const {
    return n_rows > 1 && n_rows <= thread_choice::max_rows && !results_.on_gpu() &&
           llama_n_threads(target_) < llama_n_threads_batch(target_);
}

bool target_context::took(int64_t us) {
    return !is_timed_ || threads_.add_time(us);
}

double target_context::replay(int32_t n_times) {
    if (!results_.on_gpu()) { // on a CPU what a graph read is overwritten while it runs
        fail(DW_ERR_UNSUPPORTED, "a decode is run again on a GPU only, and in one graph");
    }
    return draftwood::replay(attached_, n_times);
}

} // namespace draftwood
