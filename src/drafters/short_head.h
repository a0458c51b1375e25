// A drafter's output head with the rows of few tokens (recent_vocab.h), where the whole head lies. Of a large
// vocabulary the head is most of what a draft reads: of 35B-A3B's MTP block 417 of 450 MB. A token that it lacks cannot
// be drafted. That costs time and never changes the text. FR-Spec (arXiv:2502.14856) drafts from a fixed list of
// frequent tokens. Must not know: contexts, graphs. Test: tests/model/engine/test_short_head.py.

#pragma once

#include "drafters/recent_vocab.h"
#include "llama.h"
#include "llama/device_budget.h"
#include "llama/row_copies.h"
#include "llama/short_logits.h"

#include <ggml-cpp.h>

#include <memory>
#include <vector>

namespace draftwood {

class short_head {
  public:
    // n_asked: tokens of the head; 0: n_vocab / part. `backend` computes with `head` [n_embd, n_vocab]. Returns
    // nullptr, and the whole head is read, if that is not less than n_vocab, if a default size is under 256, without
    // memory, or if rows do not lie one after another (split over cards, repacked).
    static std::unique_ptr<short_head> make(ggml_backend_t backend, const ggml_tensor * head, int32_t n_asked,
                                            int32_t part, budget_share & share);

    // for as long as this lives: rows of the head's type, and whose they are
    head_rows rows() const { return { head_, rows_, tokens_ }; }

    int32_t     size() const { return vocab_.size(); }
    llama_token token(int32_t row) const { return vocab_.token(row); } // of rows as they are behind settle()

    // The text has these tokens. Their rows are missing until settle().
    void see(const llama_token * tokens, int32_t n);
    // All rows are there for what is queued on the backend from now on; what was queued reads them as they were.
    // copies: the backend's, or nullptr.
    void settle(row_copies copies);

  private:
    short_head(ggml_backend_t backend, const ggml_tensor * head, int32_t size);
    int64_t bytes() const { return (int64_t) (ggml_nbytes(rows_) + ggml_nbytes(tokens_)); }
    bool    allocate(budget_share & share);
    void    fill();
    void    copy_missing_tokens();

    ggml_backend_t          backend_;
    const ggml_tensor *     head_;
    recent_vocab            vocab_;
    std::vector<int32_t>    missing_;    // places of vocab_ whose rows are of other tokens
    std::vector<bool>       is_missing_; // [place]
    ggml_context_ptr        tensors_;
    ggml_tensor *           rows_;   // [n_embd, size]
    ggml_tensor *           tokens_; // i32[size]
    ggml_backend_buffer_ptr buffer_;
    budget_lease            memory_;
};

} // namespace draftwood
