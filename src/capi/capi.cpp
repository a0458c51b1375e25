// The C line: argument checks, and every exception turned into a status. Contract: draftwood.h.

#include "capi/capi.h"
#include "drafters/dflash_fit.h"
#include "drafters/probe.h"

#include <algorithm>

using namespace draftwood;

namespace {

std::vector<session *> sessions_of(const char * call, dw_engine * const * engines, int32_t n_engines) {
    if (n_engines < 1) {
        fail(DW_ERR_ARGUMENT, "%d engines; expected 1 or more", n_engines);
    }
    std::vector<session *> all;
    for (int32_t i = 0; i < n_engines; ++i) {
        require(call, engines[i]);
        all.push_back(&engines[i]->impl);
    }
    return all;
}

} // namespace

int32_t dw_api_version(void) {
    return DW_API_VERSION;
}

const char * dw_last_error(void) {
    return last_error();
}

dw_status dw_probe_model(const char * path, dw_model_info * info) {
    return guard([&] {
        require("dw_probe_model", path, info);
        require_layout("dw_model_info", *info);
        probe_model(path, *info);
        return DW_OK;
    });
}

dw_status dw_probe_drafter(const char * drafter_path, const char * target_path) {
    return guard([&] {
        require("dw_probe_drafter", drafter_path, target_path);
        require_dflash_for(target_facts(target_path), drafter_path);
        return DW_OK;
    });
}

void dw_params_init(dw_params * params) {
    if (params) {
        *params = { sizeof(dw_params), DW_DRAFTER_NONE, 4, 0.0f, INT32_MAX, nullptr, DW_LENGTH_FIXED, 0, nullptr, 0, 0,
                    /*draft_vocab*/ 0, /*results*/ 0 };
        params->begin_drafts = 1;
    }
}

dw_status dw_engine_new(llama_context * target, const llama_context_params * context_params, const dw_params * params,
                        dw_engine ** engine) {
    return guard([&] {
        require("dw_engine_new", target, context_params, params, engine);
        require_layout("dw_params", *params);
        if (params->curve) {
            require_layout("dw_curve", *params->curve);
        }
        *engine = nullptr;
        *engine = new dw_engine{ { target, *context_params, *params } };
        return DW_OK;
    });
}

void dw_engine_free(dw_engine * engine) {
    delete engine;
}

dw_status dw_eval(dw_engine * engine, const llama_token * tokens, int32_t n_tokens, int32_t n_past, bool all_logits) {
    return with(engine, "dw_eval", [&](auto & e) {
        require("dw_eval", tokens);
        e.eval(tokens, n_tokens, n_past, all_logits);
    });
}

dw_status dw_propose(dw_engine * engine, llama_token last, int32_t max_draft, int32_t * n_draft) {
    return with(engine, "dw_propose", [&](auto & e) {
        require("dw_propose", n_draft);
        *n_draft = e.propose(last, max_draft);
    });
}

dw_status dw_propose_all(dw_engine * const * engines, const llama_token * last, const int32_t * max_draft,
                         int32_t * n_draft, int32_t n_engines) {
    return guard([&] {
        require("dw_propose_all", engines, last, max_draft, n_draft);
        const std::vector<session *> all = sessions_of("dw_propose_all", engines, n_engines);
        propose_batch(all, last, max_draft).run();
        for (size_t i = 0; i < all.size(); ++i) {
            n_draft[i] = all[i]->tree().n_drafts();
        }
        return DW_OK;
    });
}

dw_status dw_propose_given(dw_engine * engine, llama_token last, const llama_token * draft, int32_t n_draft) {
    return with(engine, "dw_propose_given", [&](auto & e) {
        if (n_draft > 0) {
            require("dw_propose_given", draft);
        }
        e.propose_given(last, draft, n_draft);
    });
}

dw_status dw_verify(dw_engine * engine) {
    return with(engine, "dw_verify", [](auto & e) { e.verify(); });
}

dw_status dw_verify_all(dw_engine * const * engines, int32_t n_engines) {
    return guard([&] {
        require("dw_verify_all", engines);
        verify_batch(sessions_of("dw_verify_all", engines, n_engines)).run();
        return DW_OK;
    });
}

dw_status dw_row(dw_engine * engine, int32_t * row, int32_t * n_past) {
    return with(engine, "dw_row", [&](auto & e) {
        require("dw_row", row, n_past);
        return e.row(*row, *n_past) ? DW_OK : DW_ROUND_END;
    });
}

dw_status dw_best(const llama_context * target, int32_t row, int32_t n, llama_token * tokens, float * logits,
                  bool * found) {
    static_assert(DW_MAX_BEST == dw_n_top, "as many as a row keeps");
    return guard([&] {
        require("dw_best", target, tokens, logits, found);
        if (n < 1 || n > DW_MAX_BEST) {
            fail(DW_ERR_ARGUMENT, "found n = %d; expected 1 to %d", n, DW_MAX_BEST);
        }
        target_context * there = target_context::find(target);
        *found                 = there && there->newest_results().has_top();
        if (*found) {
            const int64_t n_rows = there->newest_results().n_top();
            if (row < -1 || (n_rows > 1 && row >= n_rows)) {
                fail(DW_ERR_ARGUMENT, "found row %d; expected 0 to %lld, or -1 for the last", row,
                     (long long) n_rows - 1);
            }
            const top_row best = there->newest_results().top(row);
            std::copy_n(best.tokens, n, tokens);
            std::copy_n(best.logits, n, logits);
        }
        return DW_OK;
    });
}

dw_status dw_next(dw_engine * engine, llama_sampler * sampler, llama_token * token) {
    return with(engine, "dw_next", [&](auto & e) {
        require("dw_next", sampler, token);
        *token = e.next(sampler);
    });
}

dw_status dw_took(dw_engine * engine, llama_token token) {
    return with(engine, "dw_took", [&](auto & e) { e.took(token); });
}

dw_status dw_took_scheduled(dw_engine * engine, llama_token token) {
    return with(engine, "dw_took_scheduled", [&](auto & e) { e.took(token, /*scheduled*/ true); });
}

void dw_request_params_init(dw_request_params * params) {
    if (params) {
        *params = { sizeof(dw_request_params), /*temperature*/ 0.0f, /*n_top*/ 0 };
    }
}

dw_status dw_set_request(dw_engine * engine, const dw_request_params * params) {
    return with(engine, "dw_set_request", [&](auto & e) {
        require("dw_set_request", params);
        require_layout("dw_request_params", *params);
        e.set_request(*params);
    });
}

dw_status dw_rewind(dw_engine * engine) {
    return with(engine, "dw_rewind", [](auto & e) { e.rewind(); });
}

dw_status dw_last_row(dw_engine * engine, int32_t * row) {
    return with(engine, "dw_last_row", [&](auto & e) {
        require("dw_last_row", row);
        return e.last_row(*row) ? DW_OK : DW_ROUND_END;
    });
}

dw_status dw_commit(dw_engine * engine) {
    return with(engine, "dw_commit", [](auto & e) { e.commit(); });
}

dw_status dw_checkpoint(dw_engine * engine) {
    return with(engine, "dw_checkpoint", [](auto & e) { e.checkpoint(); });
}

int32_t dw_reach(const dw_engine * engine, int32_t n_keep) {
    return engine ? engine->impl.reach(n_keep) : 0;
}

dw_status dw_trim(dw_engine * engine, int32_t n_keep) {
    return with(engine, "dw_trim", [&](auto & e) { e.trim(n_keep); });
}

dw_status dw_restore(dw_engine * engine, const void * state, size_t n_bytes, int32_t n_keep) {
    return with(engine, "dw_restore", [&](auto & e) {
        require("dw_restore", state);
        e.restore((const uint8_t *) state, n_bytes, n_keep);
    });
}

dw_status dw_drafter_memory(dw_engine * engine, llama_context ** memory) {
    return with(engine, "dw_drafter_memory", [&](auto & e) {
        require("dw_drafter_memory", memory);
        *memory = e.drafter_memory();
    });
}

dw_status dw_reset(dw_engine * engine) {
    return with(engine, "dw_reset", [](auto & e) { e.reset(); });
}

int32_t dw_n_past(const dw_engine * engine) {
    return engine ? engine->impl.n_past() : 0;
}

int32_t dw_draft_tokens(const dw_engine * engine) {
    return engine ? engine->impl.draft_tokens() : 0;
}

dw_status dw_get_draft(dw_engine * engine, llama_token * tokens, int32_t * n_tokens) {
    return guard([&] {
        require("dw_get_draft", engine, tokens, n_tokens);
        engine->impl.fetch_draft();
        const token_tree & tree = engine->impl.tree();
        *n_tokens               = std::max(0, tree.n_drafts());
        std::copy_n(tree.tokens.end() - *n_tokens, *n_tokens, tokens);
        return DW_OK;
    });
}

dw_status dw_get_stats(const dw_engine * engine, dw_stats * stats) {
    return guard([&] {
        require("dw_get_stats", engine, stats);
        require_layout("dw_stats", *stats);
        *stats = engine->impl.stats();
        return DW_OK;
    });
}

dw_status dw_get_curve(dw_engine * engine, dw_curve * curve) {
    return with(engine, "dw_get_curve", [&](auto & e) {
        require("dw_get_curve", curve);
        require_layout("dw_curve", *curve);
        e.curve(*curve);
    });
}

dw_status dw_stats_reset(dw_engine * engine) {
    return with(engine, "dw_stats_reset", [](auto & e) { e.stats_reset(); });
}
