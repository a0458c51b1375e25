// What is attached to a llama_context for as long as an engine or a drafter computes with it. The patched lines find it
// through llama_cparams and call it by way of hooks/. Must not know: rounds, drafters, samplers.
// Test: tests/model/test_inert.py (no attachment: a pristine build's outputs), tests/model/engine.

#pragma once

#include "llama/decode_outputs.h"
#include "llama/decode_request.h"
#include "llama/model_attachment.h"
#include "llama/sequence_set.h"
#include "llama/short_logits.h"
#include "ops/copies/copies.h"

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <vector>

struct dw_custom_op;
struct llama_context;
struct llm_graph_context;
class llm_graph_result;

namespace draftwood {

class graph_store;

// where parts of layers run as one op each (decode/fused_layers.h)
enum class fuse_where { nowhere, on_gpu, everywhere };

// tokens of each row that op dw_top_rows finds, and most rows that it runs on
constexpr int64_t dw_n_top        = 64;
constexpr int64_t dw_max_top_rows = 64;

// What the owner of an attachment hears of others who use the context.
class context_listener {
  public:
    virtual ~context_listener() = default;

    // Somebody else is about to decode into these sequences. Only accepted rows may be in the memory, and the logits
    // will be another decode's.
    virtual void on_decode(const sequence_set & into) noexcept = 0;

    // to save these sequences, or to replace them by a state that was saved
    virtual void on_save(const sequence_set & of) noexcept    = 0;
    virtual void on_replace(const sequence_set & of) noexcept = 0;
};

} // namespace draftwood

// The name is global because a patched line declares it.
struct dw_attachment {
    // Attaches to `ctx`, which must have no attachment and outlive this one. exact_rows: batches of up to so many rows
    // run on CPU kernels whose rows do not depend on each other's number. 0: never, and parts of layers are not fused
    // on a GPU either. listener: nullptr for a context that nobody else uses. model: the target's, of which a drafter
    // with a model of its own counts its memory, too.
    dw_attachment(llama_context * ctx, int32_t exact_rows, draftwood::context_listener * listener,
                  std::shared_ptr<draftwood::model_attachment> model);
    // Gives the context back its own graph, kernels and KV step.
    ~dw_attachment();
    dw_attachment(const dw_attachment &)             = delete;
    dw_attachment & operator=(const dw_attachment &) = delete;

    // the one of `ctx`; nullptr: none
    static dw_attachment * of(const llama_context * ctx) noexcept;

    // Counts the readers of the context's hidden states, or of the inputs of one of its layers. llama.cpp keeps them
    // while there is one: drafters of several sequences share a context. A drafter's constructor taps last, so a throw
    // leaves no tap behind.
    void tap_hidden(bool on) noexcept;
    void tap_layer(uint32_t il, bool on) noexcept;

    // llama.cpp keeps the hidden states of rows with an output, in a context that nobody taps.
    void keep_output_hidden();

    // n_kv of the context's graphs grows in steps of so many cells, so that a graph serves longer. few_rows: of decodes
    // whose attention passes over cells that no row sees, as that of a fused graph does
    void set_kv_steps(uint32_t few_rows, uint32_t others) noexcept;

    // Numbers of parts of layers, by decode/fused_layers.h: of ops, then of gates and guesses, which are none.
    static constexpr size_t n_ops = 16;
    using part_counts             = std::array<int32_t, n_ops + 3>;

    // Graphs are built anew.
    void                  fuse(draftwood::fuse_where where) noexcept;
    draftwood::fuse_where fuses() const { return fuses_; }
    // Takes what was fused in the newest graph. max_rows: most rows of a graph that layers are fused in. passes_over:
    // its attention passes over cells that no row sees.
    void    fused(const part_counts & parts, int32_t max_rows, bool passes_over) noexcept;
    int64_t n_fused_parts() const { return std::accumulate(n_fused.begin(), n_fused.begin() + n_ops, (int64_t) 0); }

    // What the hooks call (hooks/hooks.h), in the order of a decode.
    void decode_begins(const draftwood::sequence_set & into, int32_t n_rows) noexcept;
    void select_graph(int64_t n_rows, bool has_outputs) noexcept;
    // to a graph that is being built; returns its logits, those of a short head where it has one, or nullptr
    const ggml_tensor * add_outputs(llm_graph_context & graph) noexcept;
    bool                graph_fits() const noexcept;
    void                before_compute(ggml_backend_t backend_cpu, int64_t n_rows, llm_graph_result & graph) noexcept;
    bool                keeps(const ggml_tensor * result, float * host, size_t bytes) noexcept;
    void                state_is_written(llama_seq_id seq) noexcept; // -1: of all
    void                state_is_read(llama_seq_id seq) noexcept;

    llama_context * const               ctx;
    const int32_t                       exact_rows;
    draftwood::context_listener * const listener;
    int64_t                             n_exact_batches = 0; // on row-exact kernels; a counter for tests and doctor

    const std::shared_ptr<draftwood::model_attachment> model;
    const std::unique_ptr<draftwood::graph_store>      graphs;

    bool keeps_outputs = false; // what is computed stays where it is until somebody asks the context for it
    bool async_inputs  = false; // inputs are copied to their device without waiting for it, by `copies`
    bool memory_alone  = false; // a decode without outputs computes what the memory takes and no more
    bool rows_are_fed  = false; // rows without tokens have one value, which nobody reads: requests feed them

    dw::copies             copies = nullptr; // of the only device; nullptr: it has none
    std::vector<dw::piece> pieces;           // inputs of the graph that is about to run

    part_counts n_fused{}; // of the graph that was built last
    // Most rows of a graph with such parts; INT32_MAX: no graph has had any. A prompt's graph counts, too: its output
    // head is fused.
    int32_t fused_rows = INT32_MAX;

    const dw_custom_op * top_rows = nullptr; // op dw_top_rows for decodes with few rows
    draftwood::head_rows head;               // of logits for few tokens

    // of the decode that runs (llama/decode.h); nullptr: none runs, or somebody else's
    const draftwood::decode_request * request = nullptr;
    draftwood::decode_outputs         outputs; // of the newest decode

    // The verify whose graph llama.cpp is building now. nullptr: llama.cpp builds it alone, as when it reserves memory
    // during a decode with a graph of n_ubatch rows.
    draftwood::verify_graph * verify() const { return in_ubatch_ ? verify_of(outputs.n_ubatches) : nullptr; }

  private:
    void forget_tails();
    // of a part of the decode that runs; nullptr: llama.cpp's own graph
    draftwood::verify_graph * verify_of(int32_t part) const {
        return request && (size_t) part < request->parts.size() ? request->parts[part].verify : nullptr;
    }

    draftwood::fuse_where fuses_;
    bool                  passes_over_   = false;                       // a graph built since fuse() did: see fused()
    uint32_t              few_rows_step_ = 0, step_ = 0, set_step_ = 0; // of n_kv; 0: llama.cpp's own
    bool                  in_ubatch_      = false;                      // from its choice of graph to its compute
    int32_t               n_hidden_users_ = 0;
    std::vector<int32_t>  n_layer_users_; // [layer]
    std::map<const ggml_cgraph *, draftwood::graph_tail> tails_;
};

namespace draftwood {

using attachment = ::dw_attachment;

} // namespace draftwood
