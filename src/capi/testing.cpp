// Functions for tests and benchmarks. Contract: draftwood-testing.h.

#include "draftwood-testing.h"

#include "capi/capi.h"
#include "round/load_schedule.h"
#include "tree/build.h"

#include <algorithm>

using namespace draftwood;

namespace {

void require_budget(int32_t budget) {
    if (budget < 1 || budget > max_tree_nodes) {
        fail(DW_ERR_ARGUMENT, "a budget of %d nodes; expected 1 to %d", budget, max_tree_nodes);
    }
}

} // namespace

dw_status dw_next_scheduled(dw_engine * engine, llama_sampler * sampler, bool accept, llama_token * token) {
    return with(engine, "dw_next_scheduled", [&](auto & e) {
        require("dw_next_scheduled", sampler, token);
        *token = e.next_scheduled(sampler, accept);
    });
}

dw_status dw_replay(dw_engine * engine, int32_t n_times, double * microseconds) {
    return with(engine, "dw_replay", [&](auto & e) {
        require("dw_replay", microseconds);
        *microseconds = e.replay(n_times);
    });
}

dw_status dw_limit_memory(dw_engine * engine, int64_t drafter_bytes, int64_t graph_bytes, int64_t tree_bytes) {
    return with(engine, "dw_limit_memory", [&](auto & e) {
        device_budget & budget  = e.budget();
        budget.drafter.limit    = drafter_bytes;
        budget.graphs.limit     = graph_bytes;
        budget.tree_state.limit = tree_bytes;
    });
}

struct dw_accepted_log : accepted_observer {
    explicit dw_accepted_log(std::shared_ptr<model_attachment> of) :
        model(std::move(of)) {
        model->add(*this);
    }
    ~dw_accepted_log() override { model->remove(*this); }

    void on_accepted(const accepted_rows & rows) noexcept override {
        try {
            for (int32_t i = 0; i < rows.n; ++i) {
                entries.push_back({ rows.seq, rows.tokens[i], rows.pos + i });
            }
        } catch (const std::exception &) {
            is_whole = false;
        }
    }

    struct entry {
        llama_seq_id seq;
        llama_token  token;
        llama_pos    pos;
    };
    std::shared_ptr<model_attachment> model;
    std::vector<entry>                entries;
    bool                              is_whole = true;
};

dw_status dw_accepted_log_new(dw_engine * engine, dw_accepted_log ** log) {
    return with(engine, "dw_accepted_log_new", [&](auto & e) {
        require("dw_accepted_log_new", log);
        *log = new dw_accepted_log(e.target().context().attached().model);
    });
}

void dw_accepted_log_free(dw_accepted_log * log) {
    delete log;
}

dw_status dw_accepted_log_get(const dw_accepted_log * log, int32_t * seq_ids, llama_token * tokens, int32_t * positions,
                              int32_t * n) {
    return guard([&] {
        require("dw_accepted_log_get", log, seq_ids, tokens, positions, n);
        if (!log->is_whole) {
            fail(DW_ERR_MEMORY, "no memory for all accepted tokens");
        }
        const int32_t n_all = (int32_t) log->entries.size();
        for (int32_t i = 0; i < std::min(*n, n_all); ++i) {
            seq_ids[i]   = log->entries[i].seq;
            tokens[i]    = log->entries[i].token;
            positions[i] = log->entries[i].pos;
        }
        *n = n_all;
        return DW_OK;
    });
}

dw_status dw_tree_from_positions(int32_t root, const int32_t * tokens, const float * log_probs, int32_t n_positions,
                                 int32_t n_each, int32_t budget, int32_t spine, float beside, dw_tree * tree) {
    return guard([&] {
        require("dw_tree_from_positions", tokens, log_probs, tree);
        require_budget(budget);
        if (n_positions < 0 || n_each < 0) {
            fail(DW_ERR_ARGUMENT, "%d positions of %d candidates; expected 0 or more", n_positions, n_each);
        }
        std::vector<std::vector<candidate>> positions(n_positions);
        for (int32_t d = 0; d < n_positions; ++d) {
            for (int32_t i = 0; i < n_each; ++i) {
                positions[d].push_back({ tokens[d * n_each + i], log_probs[d * n_each + i] });
            }
        }
        to_native(tree_from_positions(root, positions, budget, spine, beside), *tree);
        return DW_OK;
    });
}

dw_status dw_tree_merge(dw_tree * tree, const dw_tree * other) {
    return guard([&] {
        require("dw_tree_merge", tree, other);
        token_tree       merged = from_native(*tree, /*by_depth*/ false);
        const token_tree added  = from_native(*other, /*by_depth*/ false);
        if (merged.tokens[0] != added.tokens[0]) {
            fail(DW_ERR_ARGUMENT, "trees with the roots %d and %d; expected one root", merged.tokens[0],
                 added.tokens[0]);
        }
        merge(merged, added);
        if (merged.size() > max_tree_nodes) {
            fail(DW_ERR_ARGUMENT, "%d nodes in both trees; expected up to %d", merged.size(), max_tree_nodes);
        }
        to_native(merged, *tree);
        return DW_OK;
    });
}

dw_status dw_tree_select(const dw_tree * tree, int32_t budget, int32_t spine, dw_tree * selected) {
    return guard([&] {
        require("dw_tree_select", tree, selected);
        require_budget(budget);
        to_native(select(from_native(*tree, /*by_depth*/ false), budget, spine), *selected);
        return DW_OK;
    });
}

int32_t dw_tree_bucket(int32_t n_nodes) {
    return bucket(n_nodes);
}

struct dw_cost_model {
    cost_model impl;
};

namespace {

// run `body(model)` behind the guard
template <typename Model, typename F> dw_status with_model(Model * model, const char * call, F && body) noexcept {
    return guard([&]() -> dw_status {
        require(call, model);
        body(model->impl);
        return DW_OK;
    });
}

void require_size(const char * what, int32_t n, int32_t least, int32_t most) {
    if (n < least || n > most) {
        fail(DW_ERR_ARGUMENT, "%s is %d; expected %d to %d", what, n, least, most);
    }
}

draft_choice choice_of(int32_t source, int32_t n_tokens) {
    require_size("source", source, 0, n_draft_sources - 1);
    require_size("n_tokens", n_tokens, 0, cost_model::max_draft);
    return { (draft_source) source, n_tokens };
}

} // namespace

dw_status dw_cost_model_new(int32_t n_warmup, bool shares_cores, dw_cost_model ** model) {
    return guard([&] {
        require("dw_cost_model_new", model);
        require_size("n_warmup", n_warmup, 0, INT32_MAX);
        *model = new dw_cost_model{ { n_warmup, shares_cores } };
        return DW_OK;
    });
}

void dw_cost_model_free(dw_cost_model * model) {
    delete model;
}

dw_status dw_cost_model_set_curve(dw_cost_model * model, const dw_curve * curve) {
    return with_model(model, "dw_cost_model_set_curve", [&](auto & m) {
        require("dw_cost_model_set_curve", curve);
        require_layout("dw_curve", *curve);
        m.set_curve(curve->draft_us, curve->verify_us);
    });
}

dw_status dw_cost_model_get_curve(const dw_cost_model * model, dw_curve * curve) {
    return with_model(model, "dw_cost_model_get_curve", [&](auto & m) {
        require("dw_cost_model_get_curve", curve);
        require_layout("dw_curve", *curve);
        m.get_curve(curve->draft_us, curve->verify_us);
    });
}

dw_status dw_cost_model_update(dw_cost_model * model, bool use_minimum) {
    return with_model(model, "dw_cost_model_update", [&](auto & m) { m.update_curve(use_minimum); });
}

dw_status dw_cost_model_add_draft_time(dw_cost_model * model, int32_t n_tokens, int64_t us) {
    return with_model(model, "dw_cost_model_add_draft_time", [&](auto & m) {
        require_size("n_tokens", n_tokens, 1, cost_model::max_draft);
        m.add_draft_time(n_tokens, us);
    });
}

dw_status dw_cost_model_add_verify_time(dw_cost_model * model, int32_t n_rows, int64_t us) {
    return with_model(model, "dw_cost_model_add_verify_time", [&](auto & m) {
        require_size("n_rows", n_rows, 1, cost_model::max_draft + 1);
        m.add_verify_time(n_rows, us);
    });
}

dw_status dw_cost_model_add_acceptance(dw_cost_model * model, int32_t source, int32_t n_judged, int32_t n_accepted) {
    return with_model(model, "dw_cost_model_add_acceptance", [&](auto & m) {
        const draft_choice draft = choice_of(source, n_judged);
        require_size("n_accepted", n_accepted, 0, n_judged);
        m.add_acceptance(draft.source, n_judged, n_accepted);
    });
}

dw_status dw_cost_model_add_branches(dw_cost_model * model, const double * probabilities, int32_t n,
                                     int32_t n_accepted) {
    return with_model(model, "dw_cost_model_add_branches", [&](auto & m) {
        require("dw_cost_model_add_branches", probabilities);
        require_size("n", n, 0, DW_MAX_TREE);
        m.add_branch_acceptance({ probabilities, probabilities + n }, n_accepted);
    });
}

dw_status dw_cost_model_is_outdated(const dw_cost_model * model, bool * is_outdated) {
    return with_model(model, "dw_cost_model_is_outdated", [&](auto & m) {
        require("dw_cost_model_is_outdated", is_outdated);
        *is_outdated = m.is_outdated();
    });
}

dw_status dw_cost_model_choose(dw_cost_model * model, int32_t longest_drafter, int32_t longest_ngram, int32_t * source,
                               int32_t * n_tokens) {
    return with_model(model, "dw_cost_model_choose", [&](auto & m) {
        require("dw_cost_model_choose", source, n_tokens);
        require_size("longest_drafter", longest_drafter, 0, cost_model::max_draft);
        require_size("longest_ngram", longest_ngram, 0, cost_model::max_draft);
        const draft_choice chosen = m.choose({ longest_drafter, longest_ngram });
        *source                   = chosen.source;
        *n_tokens                 = chosen.n_tokens;
    });
}

dw_status dw_cost_model_pays_to_branch(const dw_cost_model * model, int32_t source, int32_t n_tokens, bool * pays) {
    return with_model(model, "dw_cost_model_pays_to_branch", [&](auto & m) {
        require("dw_cost_model_pays_to_branch", pays);
        *pays = m.pays_to_branch(choice_of(source, n_tokens));
    });
}

dw_status dw_cost_model_tree_size(const dw_cost_model * model, int32_t source, int32_t n_tokens,
                                  const double * probabilities, int32_t n, int32_t * n_nodes) {
    return with_model(model, "dw_cost_model_tree_size", [&](auto & m) {
        require("dw_cost_model_tree_size", probabilities, n_nodes);
        require_size("n", n, 0, DW_MAX_TREE);
        *n_nodes = m.choose_tree_size(choice_of(source, n_tokens), { probabilities, probabilities + n });
    });
}

dw_status dw_cost_model_expect(const dw_cost_model * model, int32_t source, int32_t n_tokens, double * microseconds,
                               double * tokens) {
    return with_model(model, "dw_cost_model_expect", [&](auto & m) {
        require("dw_cost_model_expect", microseconds, tokens);
        const draft_choice draft = choice_of(source, n_tokens);
        *microseconds            = m.round_cost(draft.source, n_tokens);
        *tokens                  = m.expected_tokens(draft.source, n_tokens);
    });
}

dw_status dw_load_rounds(int32_t longest_draft, int32_t n_warmup, int32_t n_slow, int64_t slow_us, int64_t fast_us,
                         int32_t n_busy, int32_t busy, int32_t * rounds) {
    return guard([&] {
        require("dw_load_rounds", rounds);
        require_size("longest_draft", longest_draft, 1, cost_model::max_draft);
        std::fill_n(rounds, DW_CURVE_SIZE, 0);
        load_schedule schedule(longest_draft, n_warmup);
        for (int32_t i = 0; !schedule.is_done(); ++i) {
            int32_t & n_rounds = rounds[schedule.n_tokens()];
            n_rounds++;
            schedule.add_round((n_rounds <= n_slow ? slow_us : fast_us) * (i < n_busy ? busy : 1));
        }
        return DW_OK;
    });
}
