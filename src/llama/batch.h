// One batch of rows for a llama_context: a thin owner of llama_batch_ext.
// Test: tests/model/engine/test_mtp_feed.py (hidden states), tests/model/test_dflash.py (rows that are fed).

#pragma once

#include "llama.h"
#include "llama/status.h"

#include <memory>

namespace draftwood {

// What rows have instead of a token: values, which llama.cpp copies into the graph's input, or what a decode's request
// feeds (attachment::rows_are_fed).
enum class rows_have { values, feeds };

// As llama_batch_ext_init; a row without a token has one value, which nobody reads. nullptr: no memory
llama_batch_ext * new_batch_of_feeds(llama_context * ctx) noexcept;

class row_batch {
  public:
    // `ctx` must outlive the batch, whose capacity is the context's n_batch
    explicit row_batch(llama_context * ctx, rows_have what = rows_have::values) :
        ctx_(ctx),
        batch_(what == rows_have::feeds ? new_batch_of_feeds(ctx) : llama_batch_ext_init(ctx)) {
        if (!batch_) {
            fail(DW_ERR_INTERNAL, "there is no memory for a batch");
        }
    }

    void clear() {
        llama_batch_ext_clear(batch_.get());
        n_rows_ = 0;
    }
    int32_t size() const { return n_rows_; } // rows

    // token at `pos`; with `output` its logits are computed; `hidden` f32[n_embd] or nullptr is what an MTP
    // block reads beside the token, and must stay valid until decode()
    void add(llama_token token, llama_pos pos, bool output, llama_seq_id seq = 0, const float * hidden = nullptr,
             int32_t n_embd = 0) {
        const int32_t row = llama_batch_ext_add_token(batch_.get(), seq, token);
        if (row < 0) {
            fail(DW_ERR_ARGUMENT, "token %d at position %d was refused by the batch (code %d)", token, pos, row);
        }
        bool ok = llama_batch_ext_set_pos(batch_.get(), row, &pos);
        if (hidden) {
            ok = ok && llama_batch_ext_set_embd_token(batch_.get(), row, { hidden, 1, (size_t) n_embd });
        }
        ok = ok && (!output || llama_batch_ext_set_output_logits(batch_.get(), row, true));
        if (!ok) {
            fail(DW_ERR_INTERNAL, "the batch refused the row of token %d at position %d", token, pos);
        }
        ++n_rows_;
    }

    // a row that is fed instead of a token, in a batch of rows_have::feeds
    void add_fed(llama_pos pos, bool output, llama_seq_id seq = 0) {
        const float   unread = 0.0f;
        const int32_t row    = llama_batch_ext_add_embd(batch_.get(), seq, { &unread, 1, 1 });
        // models with M-RoPE take four positions a row, the last of them zero
        const llama_pos at[4] = { pos, pos, pos, 0 };
        const bool      ok    = row >= 0 && llama_batch_ext_set_pos(batch_.get(), row, at);
        if (!ok || (output && !llama_batch_ext_set_output_logits(batch_.get(), row, true))) {
            fail(DW_ERR_INTERNAL, "the batch refused a row that is fed, at position %d (code %d)", pos, row);
        }
        ++n_rows_;
    }

    // llama_decode's return value
    int32_t decode() { return llama_process(ctx_, LLAMA_PROCESS_TYPE_DECODE, batch_.get()); }

  private:
    struct deleter {
        void operator()(llama_batch_ext * batch) const { llama_batch_ext_free(batch); }
    };

    llama_context *                           ctx_;
    std::unique_ptr<llama_batch_ext, deleter> batch_;
    int32_t                                   n_rows_ = 0;
};

} // namespace draftwood
