// What the newest decode of a llama_context left where it was computed: the best tokens of each row, hidden states,
// inputs of layers. llama.cpp copies all of it to the host, a megabyte of logits a row; here only what is asked for
// travels, and drafters read it on their own device. Of a decode that is queued behind it the results are pending until
// somebody takes them. Must not know: rounds, drafters, samplers.
// Test: tests/model/engine/test_results.py, tests/gpu.

#pragma once

#include "llama/attachment.h"
#include "llama/fence.h"
#include "llama/fetched.h"

#include <array>
#include <cstdint>
#include <vector>

namespace draftwood {

// The best tokens of a row of logits: i32[dw_n_top], f32[dw_n_top], best first.
struct top_row {
    const int32_t * tokens;
    const float *   logits;
    float           log_sum; // of exp over the vocabulary, or over what a short head has of it
};

// f32[n]: of a token each, or of a row of a short head (short_logits.h)
struct logit_row {
    const float * values;
    int32_t       n;
};

// Rows of f32 values of a decode, in the order of its batch, either where they were computed or on the host.
struct result_rows {
    const ggml_tensor * tensor; // nullptr: on the host
    const float *       host;
};

class results {
  public:
    // Of the context that `attached` belongs to, whose outputs it settles how to keep. `head` is the weight that gives
    // its logits: the best tokens are found on the device that holds it, if that is a GPU, or `always`.
    results(attachment & attached, const ggml_tensor * head, bool always);

    results(const results &)             = delete;
    results & operator=(const results &) = delete;

    // llama_context::decode was called, for rows of one sequence or several. is_read: top() will be called, so a GPU's
    // rows are queued for the host behind the graph.
    void decoded(bool is_read);
    // another decode comes: these results are gone, and pending ones
    void forget();

    // Around a decode of one row that is queued behind the newest one (decode_request::fork); is_there: it was. The
    // results stay the newest decode's until take_pending().
    void queue_begins();
    void queued(bool is_there);
    bool has_pending() const { return has_pending_; }
    void take_pending(); // it is the newest decode now
    void drop_pending() noexcept;

    // the graphs that they lie in are about to go: what was not copied yet is copied to where llama.cpp has it
    void let_go();

    // f32[n_embd, rows] of the newest decode: hidden states, inputs of a layer
    result_rows hidden() const;
    result_rows layer_input(int32_t il) const;

    // Whether the newest decode has its rows' best tokens. top() gives those of row i of its batch (-1: the last); its
    // first call waits for all rows. Either all rows of the batch are outputs, or one is.
    bool    has_top() const { return top_ != nullptr; }
    bool    is_short() const { return few_logits_ != nullptr; } // its logits are of a short head
    bool    is_lost() const { return is_lost_; }                // of a short head, computed in several graphs
    top_row top(int32_t i);
    int64_t n_top() const { return top_ ? top_->ne[1] : 0; } // rows of them
    void    wait_for_top();                                  // in has_top() only
    // the same where it was computed, as ops/top-rows/row.h packs it: a row begins with its best token, an int32
    const ggml_tensor * device_top() const { return top_; }

    // Logits of row i, as top() counts rows, of all tokens or of the few that the attachment's head has.
    logit_row logits(int32_t i);

    // whether results of a decode of one ubatch stay where they were computed
    bool stay() const { return attached_.keeps_outputs; }

    // the backend that computes the logits, if that is a CUDA device; else the CPU's
    ggml_backend_t backend() const { return backend_; }
    bool           on_gpu() const { return on_gpu_; }

    // work queued on `reader` from now on waits for the results
    void wait_for(ggml_backend_t reader) const;
    // work queued on `reader` so far reads them: the next decode waits for it
    void taken_by(ggml_backend_t reader);

  private:
    bool in_one_graph() const { return attached_.keeps_outputs && attached_.outputs.n_ubatches == 1; }
    void locate_rows();
    void forget_newest();
    void ask(fetched_values & rows, const ggml_tensor * top);
    void fetch();

    attachment &         attached_;
    ggml_backend_t       backend_;
    bool                 on_gpu_;
    ggml_tensor *        top_        = nullptr;
    ggml_tensor *        few_logits_ = nullptr;
    bool                 is_lost_    = false;
    std::vector<float>   few_row_;        // copy of a row of few_logits_
    const float *        host_ = nullptr; // what was fetched; nullptr: not looked at yet
    std::vector<int32_t> ids_;            // of all its rows, dw_n_top each
    fence                ready_, taken_;

    std::array<fetched_values, 2> fetched_;         // best tokens of the newest decode and of the pending one
    size_t                        newest_      = 0; // of the two
    bool                          has_pending_ = false;
    decode_outputs                pending_; // outputs of that decode
};

} // namespace draftwood
