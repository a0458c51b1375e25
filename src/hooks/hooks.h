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

// Builds the recurrent layers of a verify's graph in place of llama.cpp, so that the state is read and not written:
// which draft tokens stay is only known afterwards (src/spec/tree_state.h). One sequence, f32.
class dw_verify_graph {
  public:
    virtual ~dw_verify_graph() = default;

    // conv inputs x [C, N] of layer il -> what ggml_ssm_conv takes; cell i32[1] is the row of the sequence's state
    virtual ggml_tensor * conv_input(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cell, ggml_tensor * x,
                                     int il) = 0;

    // the layer's output [S, H, N, 1]; arguments as in ggml_gated_delta_net
    virtual ggml_tensor * delta_net(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cell, ggml_tensor * q,
                                    ggml_tensor * k, ggml_tensor * v, ggml_tensor * g, ggml_tensor * beta, int il) = 0;
};

// What an attached engine wants to hear of its llama_context. Owned by the engine.
struct dw_state {
    // rows of a batch up to which CPU kernels run whose rows do not depend on each other's number; 0: never
    int32_t exact_rows = 0;

    // batches that ran on the row-exact kernels since the engine was attached (a counter for tests and doctor)
    int64_t n_exact_batches = 0;

    // ends an open verify before somebody else looks at the context's memory, or decodes into it; may be nullptr
    void (*flush)(void * user, bool decodes) noexcept = nullptr;

    // the context's memory was replaced from outside (state load); may be nullptr
    void (*replaced)(void * user) noexcept = nullptr;

    void * user = nullptr;

    // graphs by number of rows (graphs.h); nullptr: the newest graph only, as llama.cpp does
    dw_graph_store * graphs = nullptr;

    // set while a verify is decoded that leaves the recurrent state alone; nullptr: llama.cpp's own graph
    dw_verify_graph * verify = nullptr;
};

// Where the patch keeps the pointer of `ctx`. Whoever sets it clears it before the state or the context goes.
dw_state *& dw_state_of(llama_context * ctx) noexcept;

// The CPU backend that `ctx` computes with; nullptr: none.
ggml_backend_t dw_cpu_backend(llama_context * ctx) noexcept;

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

// llm_graph_context::build_rs, first line: no state is copied in a verify; returns nullptr elsewhere.
ggml_tensor * dw_hook_build_rs(const dw_state * dw, ggml_context * ctx, ggml_tensor * states, int64_t state_size,
                               int64_t n_seqs) noexcept;

// llm_build_delta_net_base::build_conv_state and build_recurrent_attn, first lines: see dw_verify_graph; both return
// nullptr where llama.cpp builds.
ggml_tensor * dw_hook_conv_state(const dw_state * dw, ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cell,
                                 ggml_tensor * x, int il) noexcept;
ggml_tensor * dw_hook_delta_net(const dw_state * dw, ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cell,
                                ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * g, ggml_tensor * beta,
                                int il) noexcept;
