// Private members of llama_context that draftwood swaps or sets. Test: tests/model/test_graphs.py, engine/test_gaps.py.

#pragma once

#include "llama-batch.h"
#include "llama-context.h"

// A friend of llama_context by a patched line: its newest graph of batches with outputs, its scheduler, whether the
// next decode makes another, and who splits its batches.
struct dw_context_graph {
    static llm_graph_result_ptr &   result(llama_context & ctx) { return ctx.gf_res_prev[1]; }
    static llm_graph_result *&      reusable(llama_context & ctx) { return ctx.gf_res_prev_active; }
    static ggml_backend_sched_ptr & sched(llama_context & ctx) { return ctx.sched; }
    static bool                     is_changed(const llama_context & ctx) { return ctx.sched_need_reserve; }
    static llama_batch_allocr &     batches(llama_context & ctx) { return *ctx.balloc; }
};
