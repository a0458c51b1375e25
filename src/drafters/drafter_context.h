// A llama_context of drafters, one for all sequences of their target: decodes rows into it, cuts it, reads the
// likeliest token. Must not know: the target's memory, rounds, samplers.
// Test: tests/model/engine/test_results.py, test_short_head.py, test_budget.py.

#pragma once

#include "drafters/short_head.h"
#include "llama/attachment.h"
#include "llama/batch.h"
#include "llama/facts.h"
#include "llama/memory.h"
#include "llama/results.h"
#include "tree/build.h"

#include <memory>
#include <string>

namespace draftwood {

// the most probable token of a row of logits
struct likeliest {
    llama_token token;
    float       path; // probability of the draft up to it; 1 if p_min is 0
};

// how often a draft of several tokens reads the output head
enum class head_reads { once, each_token };

class drafter_context {
  public:
    // What every drafter's context shares with its target's parameters: as many sequences of the same length, and KV
    // caches whose rejected cells are just removed.
    static llama_context_params params_for(llama_context * target, llama_context_params params);

    // Takes `ctx`, whose logits `head` gives. exact_rows as in dw_params: drafts need no exact rows, but on
    // CPU those kernels are the faster ones for a few rows (bench/LOG.md).
    // `model`: the target's, whose budget counts this context's memory. rows: those of its batches that have no token.
    drafter_context(llama_context * ctx, const logits_head & head, head_reads reads, const dw_params & params,
                    std::shared_ptr<model_attachment> model, rows_have rows = rows_have::values);
    ~drafter_context()                                   = default;
    drafter_context(const drafter_context &)             = delete;
    drafter_context & operator=(const drafter_context &) = delete;

    llama_context * get() const { return ctx_.get(); }
    row_batch &     batch() { return batch_; } // of the next decode; the caller clears it
    attachment &    attached() { return attached_; }
    // from now on decodes leave the hidden states of rows with an output
    void keep_hidden() { attached_.keep_output_hidden(); }
    // from now on decodes without outputs compute what the KV cache takes and no more: for a drafter of one layer
    void      skip_unused() { attached_.memory_alone = true; }
    results & newest_results() { return results_; } // by the newest decode
    // the text has these tokens: the short head gets their rows
    void      see(const llama_token * tokens, int32_t n);
    bool      short_of_memory() const;
    llama_pos end(llama_seq_id seq) const { return llama_memory_seq_pos_max(memory(), seq) + 1; }
    void      remove_from(llama_seq_id seq, llama_pos pos) { draftwood::remove_from(ctx_.get(), seq, pos); }
    // decode_request::slot. A graph is kept by its kind, the first sequence of its rows and their number. Each drafter
    // names its kinds by an enum of its own, from 0 to n_graph_kinds - 1.
    template <typename Kind> static int32_t slot(Kind kind, llama_seq_id first) {
        static_assert((int32_t) Kind::n <= n_graph_kinds);
        return (int32_t) kind + n_graph_kinds * first;
    }
    int32_t n_positions() const { return (int32_t) llama_n_ctx_seq(ctx_.get()); } // of a sequence

    // The best token of row i of the newest decode (-1: its last). Its probability among the tokens that drafts are
    // chosen from may take a pass over their logits: it is only found where p_min > 0 lets it decide something.
    likeliest best(int32_t i, float path, float p_min);

    // The few that a tree may branch into, with their probabilities for a request that samples at `temperature`.
    std::vector<candidate> candidates(int32_t i, float temperature);

    // Whether n_rows may be decoded that nobody needs: neither a graph's memory nor cells are short. Other sequences
    // may need cells for their drafts meanwhile.
    bool can_begin(llama_seq_id seq, int32_t n_rows) const;

    // tokens that drafts are chosen from; 0: the whole vocabulary
    int32_t draft_vocab() const { return short_head_ ? short_head_->size() : 0; }

    // Decode the batch's rows as `request` says. Returns what llama_decode does, or another number than 0 where the
    // rows' logits are lost.
    int32_t decode(const decode_request & request);
    // The same for rows that nobody needs: if their graph finds no memory, others keep theirs. -2: it found none.
    // Before it, !short_of_memory().
    int32_t try_to_decode(const decode_request & request);

  private:
    static constexpr int32_t n_graph_kinds = 6; // most that a drafter has

    struct deleter {
        void operator()(llama_context * ctx) const { llama_free(ctx); }
    };

    void           see_control_tokens();
    int32_t        decoded(int32_t rc);
    void           begin_decode();
    llama_token    token_of(int32_t logit) const; // of the newest decode's rows
    llama_memory_t memory() const { return llama_get_memory(ctx_.get()); }

    std::unique_ptr<llama_context, deleter> ctx_;
    attachment                              attached_;
    budget_lease                            memory_; // of its KV cache and compute buffers
    row_batch                               batch_;
    results                                 results_;
    std::unique_ptr<short_head>             short_head_; // nullptr: drafts are of the whole vocabulary
};

// The name of a kind of drafter for target_context::shared(): with how it chooses among tokens. Of drafters that share
// one, the first gives it its context_params.
std::string drafter_key(const char * kind, const dw_params & params);

} // namespace draftwood
