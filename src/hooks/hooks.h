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
#include <map>
#include <vector>

struct llama_context;
struct dw_custom_op;
class dw_graph_store;

// Where the rows of a decode were put, told after the graph's inputs are set and before it is computed.
struct dw_placed_rows {
    int64_t         n;       // rows
    const int64_t * cells;   // by row, counted through all streams of the KV cache
    ggml_tensor *   kq_mask; // f32 or f16 [n_kv, n / n_streams, 1, n_streams] in host memory, 0 or -inf
};

// Decides which of the rows see each other, where the order of their positions does not say it.
class dw_row_mask {
  public:
    virtual ~dw_row_mask() = default;

    virtual void placed(const dw_placed_rows & rows) noexcept = 0;
};

// Builds parts of a verify's graph in place of llama.cpp: recurrent layers, so that the state is read and not written,
// since which draft tokens stay is only known afterwards; attention without flash attention, so that drafts in a tree
// round as in plain decoding (src/verify/tree_state.h). S head size, H heads, N rows a sequence.
class dw_verify_graph : public dw_row_mask {
  public:
    // which of the graphs that this builds for a number of rows comes next
    virtual int32_t variant() const noexcept = 0;

    // conv inputs x [C, N, n_seqs] of layer il -> what ggml_ssm_conv takes; cells i32[n_seqs] are the sequences' states
    virtual ggml_tensor * conv_input(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cells, ggml_tensor * x,
                                     int il) = 0;

    // the layer's output [S, H, N, n_seqs]; arguments as in ggml_gated_delta_net
    virtual ggml_tensor * delta_net(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cells, ggml_tensor * q,
                                    ggml_tensor * k, ggml_tensor * v, ggml_tensor * g, ggml_tensor * beta, int il) = 0;

    // scores [n_kv, rows, H, n_streams] of keys and queries, before mask and softmax -> the same, arranged
    virtual ggml_tensor * attn_scores(ggml_context * ctx, ggml_tensor * scores) = 0;

    // values [n_kv, S, Hkv, n_streams] weighed by weights of the scores' shape -> as ggml_mul_mat gives it
    virtual ggml_tensor * attn_values(ggml_context * ctx, ggml_tensor * values, ggml_tensor * weights) = 0;
};

// Bytes of a decode's input that lie in another tensor, mostly on a device: the host's copy of them means nothing.
struct dw_feed {
    enum kind { token, hidden } input; // i32[rows], f32[n_embd, rows]
    size_t              at;            // of the input, bytes
    const ggml_tensor * from;          // valid until the decode has run
    size_t              offset, bytes; // of `from`
    ggml_backend_t      writer;        // in whose stream `from` is written, and read where `stays`
    bool                stays;         // all who read the input are on the device of `from`
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

    // it is the engine that decodes; graphs are kept for it, others have the context's own as ever
    bool ours = false;

    // graphs by number of rows (graphs.h); nullptr: the newest graph only, as llama.cpp does
    dw_graph_store * graphs = nullptr;

    // set while a verify is decoded that leaves the recurrent state alone; nullptr: llama.cpp's own graph
    dw_verify_graph * verify = nullptr;

    // which of the graphs of a number of rows comes next, where it is no verify: two that take turns can be queued
    int32_t variant = 0;

    // drafters that read the context's hidden states, and inputs of a layer: on while one is left
    int32_t                     n_hidden_users = 0;
    std::map<uint32_t, int32_t> n_layer_users;

    // set while rows are decoded that do not all see those before them; nullptr: llama.cpp's own mask
    dw_row_mask * mask = nullptr;

    // What is computed stays where it is, until somebody asks the context for it (dw_hook_read).
    bool keeps = false;
    struct kept {
        const ggml_tensor * tensor;
        float *             host;  // where llama.cpp would have copied it to,
        size_t              bytes; // and how much of it
    };
    std::vector<kept> kept_outputs;
    // of the newest decode: its last graph, and how many it took
    llm_graph_result * result     = nullptr;
    int32_t            n_ubatches = 0;

    // op dw_top_rows (src/ops/top-rows/top-rows.h), to be run on the logits of decodes with few rows; nullptr: none is
    const dw_custom_op *                         top_rows = nullptr;
    std::map<const ggml_cgraph *, ggml_tensor *> tops;          // its results, by graph
    ggml_tensor *                                top = nullptr; // of the newest decode; nullptr: it has none

    // inputs of the next decode, cleared by whoever calls it
    std::vector<dw_feed> feeds;
    struct resolved_feed {
        dw_feed       feed;
        ggml_tensor * input;
    };
    std::vector<resolved_feed> resolved; // of the decode that runs

    // inputs are copied to their device without waiting for it, and n_kv grows in steps of so many cells
    bool     async_inputs = false;
    uint32_t kv_step      = 0; // 0: llama.cpp's
};

// Where the patch keeps the pointer of `ctx`. Whoever sets it clears it before the state or the context goes.
dw_state *& dw_state_of(llama_context * ctx) noexcept;

// The CPU backend that `ctx` computes with; nullptr: none.
ggml_backend_t dw_cpu_backend(llama_context * ctx) noexcept;

// Back to the kernels that `ctx` would use without us; the choice of dw_hook_compute outlives its state.
void dw_use_stock_kernels(llama_context * ctx) noexcept;

// Inputs of graphs that this thread computes from now on are copied as `dw` wants it; nullptr: as ggml does. Set by
// dw_hook_compute for a decode of ours; who runs that one sets it back.
void dw_copy_inputs_for(dw_state * dw) noexcept;

// tokens of each row that dw_top_rows finds, and most rows that it is run on
constexpr int64_t dw_n_top        = 64;
constexpr int64_t dw_max_top_rows = 64;

// `bytes` of a tensor from `offset` on, as a tensor of bytes that can be copied
ggml_tensor dw_part_of(const ggml_tensor * tensor, size_t offset, size_t bytes) noexcept;

// llama_context::decode, first line of both: a raw decode must not land behind rows that were never accepted,
// nor take its positions from them.
void dw_hook_decode(dw_state * dw) noexcept;

// llama_context::process_ubatch, before the last graph is looked at: put the one for n_rows rows in its place.
// The three references are the context's members; has_outputs tells whose arena `result` is.
void dw_hook_graph(dw_state * dw, int64_t n_rows, bool has_outputs, llm_graph_result_ptr & result,
                   llm_graph_result *& reusable, ggml_backend_sched_ptr & sched) noexcept;

// llama_context::process_ubatch, where a new graph was given its memory: false if it must not be computed with so
// little left.
bool dw_hook_fits(const dw_state * dw) noexcept;

// llama_context::process_ubatch, before the graph is computed: choose the CPU kernels for n_rows rows, and mask them.
// backend_cpu may be nullptr.
void dw_hook_compute(dw_state * dw, ggml_backend_t backend_cpu, int64_t n_rows, llm_graph_result & graph) noexcept;

// llama_context::decode, for each of its results, before it is copied to the host: true if it stays where it is.
bool dw_hook_keeps(dw_state * dw, const ggml_tensor * result, float * host, size_t bytes) noexcept;

// llama_context::output_reorder, where all who ask for results of a decode come by: copy those that stayed.
void dw_hook_read(dw_state * dw) noexcept;

// llama_model::build_graph, behind the model's own nodes: add ours that work on its results.
void dw_hook_outputs(dw_state * dw, llm_graph_context & graph) noexcept;

// llama_kv_cache::get_n_kv, in a decode: the step in which it grows, where llama.cpp takes `step`.
uint32_t dw_hook_kv_step(uint32_t step) noexcept;

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

// llm_graph_context::build_attn_mha without flash attention, in front of the softmax and in place of the product with
// the values: see dw_verify_graph.
ggml_tensor * dw_hook_attn_scores(const dw_state * dw, ggml_context * ctx, ggml_tensor * scores) noexcept;
ggml_tensor * dw_hook_attn_values(const dw_state * dw, ggml_context * ctx, ggml_tensor * values,
                                  ggml_tensor * weights) noexcept;
