// A drafter's output head with the rows of few tokens (recent_vocab.h). Of a large vocabulary the head is most of what
// a draft reads: of 35B-A3B's MTP block 417 of 450 MB. A token that it lacks cannot be drafted. That costs time and
// never changes the text. FR-Spec (arXiv:2502.14856) drafts from a fixed list of frequent tokens. Must not know:
// contexts, graphs. Test: tests/model/engine/test_short_head.py.

#pragma once

#include "drafters/recent_vocab.h"
#include "llama.h"
#include "llama/device_budget.h"

#include <ggml-cpp.h>

#include <memory>

namespace draftwood {

class short_head {
  public:
    // Of n_asked tokens; 0: an eighth of the vocabulary. Returns nullptr, for the whole head, where that is all of it
    // or too few, without memory, or if the rows of `head` [n_embd, n_vocab] are not in plain host memory.
    static std::unique_ptr<short_head> make(const ggml_tensor * head, int32_t n_asked, budget_share & share);

    // the same type [n_embd, size]; for as long as this lives
    ggml_tensor * rows() const { return rows_; }

    int32_t     size() const { return vocab_.size(); }
    llama_token token(int32_t row) const { return vocab_.token(row); }

    // the text has these tokens; no graph that reads the rows may run meanwhile
    void see(const llama_token * tokens, int32_t n);

  private:
    short_head(const ggml_tensor * head, ggml_tensor * rows, ggml_context_ptr tensors, ggml_backend_buffer_ptr buffer,
               budget_lease memory);

    const ggml_tensor *     head_;
    recent_vocab            vocab_;
    ggml_context_ptr        tensors_;
    ggml_tensor *           rows_;
    ggml_backend_buffer_ptr buffer_;
    budget_lease            memory_;
};

} // namespace draftwood
