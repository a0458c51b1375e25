// What is chosen by measured times, for tests and benchmarks. Contract: draftwood-testing.h.

#include "draftwood-testing.h"

#include "capi/capi.h"
#include "llama/thread_choice.h"
#include "round/batch_model.h"
#include "round/cost_model.h"
#include "round/load_schedule.h"

#include <algorithm>

using namespace draftwood;

struct dw_cost_model {
    cost_model impl;
};

struct dw_batch_model {
    batch_model impl;
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

dw_status dw_cost_model_new(int32_t n_warmup, bool shares_cores, bool copies_experts, dw_cost_model ** model) {
    return guard([&] {
        require("dw_cost_model_new", model);
        require_size("n_warmup", n_warmup, 0, INT32_MAX);
        *model = new dw_cost_model{ { n_warmup, shares_cores, copies_experts } };
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

dw_status dw_cost_model_update(dw_cost_model * model, bool at_load) {
    return with_model(model, "dw_cost_model_update", [&](auto & m) {
        if (at_load) {
            m.update_curve_at_load();
        } else {
            m.update_curve();
        }
    });
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

dw_status dw_cost_model_add_draft(dw_cost_model * model, int32_t n_tokens, int64_t us) {
    return with_model(model, "dw_cost_model_add_draft", [&](auto & m) {
        require_size("n_tokens", n_tokens, 1, cost_model::max_draft);
        m.add_draft(n_tokens, us);
    });
}

dw_status dw_cost_model_add_round(dw_cost_model * model, bool drafted, int32_t n_rows, int32_t n_tokens, int64_t us) {
    return with_model(model, "dw_cost_model_add_round", [&](auto & m) {
        require_size("n_rows", n_rows, 1, cost_model::max_draft + 1);
        require_size("n_tokens", n_tokens, 1, n_rows);
        m.add_tokens(n_tokens);
        m.add_round(drafted, n_rows, us);
    });
}

dw_status dw_cost_model_add_prompt(dw_cost_model * model, int32_t n_tokens) {
    return with_model(model, "dw_cost_model_add_prompt", [&](auto & m) {
        require_size("n_tokens", n_tokens, 1, INT32_MAX);
        m.add_tokens(n_tokens);
        m.begin_text();
    });
}

dw_status dw_cost_model_cost_behind_draft(const dw_cost_model * model, double * microseconds) {
    return with_model(model, "dw_cost_model_cost_behind_draft", [&](auto & m) {
        require("dw_cost_model_cost_behind_draft", microseconds);
        *microseconds = m.cost_behind_draft();
    });
}

dw_status dw_cost_model_cost_of_return(const dw_cost_model * model, double * microseconds) {
    return with_model(model, "dw_cost_model_cost_of_return", [&](auto & m) {
        require("dw_cost_model_cost_of_return", microseconds);
        *microseconds = m.cost_of_return();
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

dw_status dw_cost_model_plain_step_comes(const dw_cost_model * model, bool * comes) {
    return with_model(model, "dw_cost_model_plain_step_comes", [&](auto & m) {
        require("dw_cost_model_plain_step_comes", comes);
        *comes = m.plain_step_comes();
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

struct dw_thread_choice {
    thread_choice impl;
};

dw_status dw_thread_choice_new(dw_thread_choice ** choice) {
    return guard([&] {
        require("dw_thread_choice_new", choice);
        *choice = new dw_thread_choice{};
        return DW_OK;
    });
}

void dw_thread_choice_free(dw_thread_choice * choice) {
    delete choice;
}

dw_status dw_thread_choice_verify(dw_thread_choice * choice, int32_t n_rows, const int64_t * us, bool * on_n_threads,
                                  bool * is_trial) {
    return with_model(choice, "dw_thread_choice_verify", [&](auto & threads) {
        require("dw_thread_choice_verify", us, on_n_threads, is_trial);
        require_size("n_rows", n_rows, 1, thread_choice::max_rows);
        const thread_count runs_on = threads.choose(n_rows);
        *on_n_threads              = runs_on == n_threads;
        *is_trial                  = !threads.add_time(us[runs_on]);
    });
}

dw_status dw_batch_model_new(int32_t n_warmup, bool shares_cores, dw_batch_model ** model) {
    return guard([&] {
        require("dw_batch_model_new", model);
        require_size("n_warmup", n_warmup, 0, INT32_MAX);
        *model = new dw_batch_model{ { n_warmup, shares_cores } };
        return DW_OK;
    });
}

void dw_batch_model_free(dw_batch_model * model) {
    delete model;
}

dw_status dw_batch_model_add_verify(dw_batch_model * model, int32_t n_sequences, int32_t n_rows, int64_t us) {
    return with_model(model, "dw_batch_model_add_verify", [&](auto & m) {
        require_size("n_sequences", n_sequences, 1, INT32_MAX);
        require_size("n_rows", n_rows, 1, max_tree_nodes);
        m.add_verify(n_sequences, n_rows, (double) us);
    });
}

dw_status dw_batch_model_add_draft(dw_batch_model * model, int32_t n_sequences, int32_t n_tokens, int64_t us) {
    return with_model(model, "dw_batch_model_add_draft", [&](auto & m) {
        require_size("n_sequences", n_sequences, 1, INT32_MAX);
        require_size("n_tokens", n_tokens, 1, cost_model::max_draft);
        m.add_draft(n_sequences, n_tokens, (double) us);
    });
}

dw_status dw_batch_model_choose(dw_batch_model * model, const dw_cost_model * solo, const double * acceptance,
                                const int32_t * longest, int32_t n, int32_t * n_tokens) {
    return with_model(model, "dw_batch_model_choose", [&](auto & m) {
        require("dw_batch_model_choose", solo, acceptance, longest, n_tokens);
        require_size("n", n, 1, INT32_MAX);
        std::vector<batch_model::member> members(n);
        for (int32_t i = 0; i < n; ++i) {
            require_size("longest", longest[i], 0, cost_model::max_draft);
            members[i]  = { { 1.0 }, /*by_drafter*/ true, /*fixed_rows*/ 0 };
            double path = 1.0;
            for (int32_t k = 0; k < longest[i]; ++k) {
                path *= acceptance[i];
                members[i].tokens.push_back(members[i].tokens.back() + path);
            }
        }
        const auto time = [&](const std::vector<int32_t> & rows) {
            return m.verify(n, *std::max_element(rows.begin(), rows.end()), solo->impl);
        };
        const std::vector<int32_t> chosen = m.choose(members, time, solo->impl);
        std::copy(chosen.begin(), chosen.end(), n_tokens);
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
