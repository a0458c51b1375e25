// Private members of llama_context that draftwood swaps or sets. Test: tests/model/test_graphs.py, engine/test_gaps.py,
// engine/test_queued_steps.py.

#pragma once

#include "llama-batch.h"
#include "llama-context.h"

// A friend of llama_context by a patched line.
struct dw_context_graph {
    // its newest graph of batches with outputs, its scheduler, whether the next decode makes another
    static llm_graph_result_ptr &   result(llama_context & ctx) { return ctx.gf_res_prev[1]; }
    static llm_graph_result *&      reusable(llama_context & ctx) { return ctx.gf_res_prev_active; }
    static ggml_backend_sched_ptr & sched(llama_context & ctx) { return ctx.sched; }
    static bool                     is_changed(const llama_context & ctx) { return ctx.sched_need_reserve; }

    // who splits its batches
    static llama_batch_allocr & batches(llama_context & ctx) { return *ctx.balloc; }

    // whether tokens are sampled in its graphs
    static bool has_samplers(const llama_context & ctx) { return !ctx.sampling.samplers.empty(); }

    // it has one row with an output, the first one of its batch
    static void restore_one_row(llama_context & ctx) {
        ctx.n_outputs     = 1;
        ctx.output_ids[0] = 0;
    }

    // see llama/decode.h
    static void count_step(llama_context & ctx) {
        const int64_t n_before = ctx.n_queued_tokens - 2; // of a prompt that nobody waited for
        if (n_before < 0) {
            return; // somebody waited, and llama.cpp counted
        }
        const int64_t now  = ggml_time_us();
        int64_t &     time = n_before > 0 ? ctx.t_p_eval_us : ctx.t_eval_us;
        time += ctx.cparams.no_perf ? 0 : now - ctx.t_compute_start_us;
        ctx.n_p_eval += (int32_t) n_before;
        ctx.n_eval++;
        if (!ctx.has_evaluated_once) {
            ctx.t_load_us          = now - ctx.t_start_us;
            ctx.has_evaluated_once = true;
        }
        ctx.n_queued_tokens    = 1;
        ctx.t_compute_start_us = now;
    }
    static void uncount_step(llama_context & ctx) {
        if (ctx.n_queued_tokens > 0) {
            ctx.n_queued_tokens--;
        } else {
            ctx.n_eval--; // somebody waited for it
        }
        ctx.t_compute_start_us = ctx.n_queued_tokens > 0 ? ctx.t_compute_start_us : 0;
    }
};
