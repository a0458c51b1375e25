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
        const int64_t now = ggml_time_us();
        ctx.t_eval_us += ctx.cparams.no_perf ? 0 : now - ctx.t_compute_start_us;
        ctx.t_compute_start_us = now;
        ctx.n_eval++;
        ctx.n_queued_tokens--;
    }
    static void uncount_step(llama_context & ctx) { ctx.n_queued_tokens -= ctx.n_queued_tokens > 0 ? 1 : 0; }
};
