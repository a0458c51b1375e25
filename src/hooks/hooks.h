// The contract between llama.cpp's patched lines and draftwood: the only room that llama.cpp calls.
//
// Every hook takes the per-context pointer that the patch `llama-cparams-hook-state` adds to
// llama_cparams. It is nullptr unless an engine was attached, and then each hook returns at once:
// a build with draftwood switched off computes what a pristine build computes
// (tests/model/test_inert.py). Hooks never throw and never abort.

#pragma once

#include "ggml-cpp.h"
#include "llama-graph.h"

#include <cstdint>

struct llama_context;
class dw_graph_store;

// What an attached engine wants to hear of its llama_context. Owned by the engine.
struct dw_state {
    // rows of a batch up to which CPU kernels run whose rows do not depend on each other's number; 0: never
    int32_t exact_rows = 0;

    // batches that ran on the row-exact kernels since the engine was attached (a counter for tests and doctor)
    int64_t n_exact_batches = 0;

    // ends an open verify before somebody else looks at the context's memory; may be nullptr
    void (*flush)(void * user) noexcept = nullptr;

    // the context's memory was replaced from outside (state load); may be nullptr
    void (*replaced)(void * user) noexcept = nullptr;

    void * user = nullptr;

    // graphs by number of rows (graphs.h); nullptr: the newest graph only, as llama.cpp does
    dw_graph_store * graphs = nullptr;
};

// Where the patch keeps the pointer of `ctx`. Whoever sets it clears it before the state or the context goes.
dw_state *& dw_state_of(llama_context * ctx) noexcept;

// Back to the kernels that `ctx` would use without us; the choice of dw_hook_compute outlives its state.
void dw_use_stock_kernels(llama_context * ctx) noexcept;

// llama_context::decode, first line of both: a raw decode must not land behind rows that were never accepted,
// nor take its positions from them.
void dw_hook_decode(dw_state * dw) noexcept;

// llama_context::process_ubatch, before the last graph is looked at: put the one for n_rows rows in its place.
// The three references are the context's members; has_outputs tells whose arena `result` is.
void dw_hook_graph(dw_state * dw, int64_t n_rows, bool has_outputs, llm_graph_result_ptr & result,
                   llm_graph_result *& reusable, ggml_backend_sched_ptr & sched) noexcept;

// llama_context::process_ubatch, before the graph is computed: choose the CPU kernels for n_rows rows.
// backend_cpu may be nullptr.
void dw_hook_compute(dw_state * dw, ggml_backend_t backend_cpu, int64_t n_rows) noexcept;

// llama_context::state_write_data and state_seq_write_data, before the memory is written.
void dw_hook_state_write(dw_state * dw) noexcept;

// llama_context::state_read_data and state_seq_read_data, before the memory is read.
void dw_hook_state_read(dw_state * dw) noexcept;
