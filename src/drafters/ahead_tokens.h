// Tokens of a chain that stay on the device where they were drafted: the verify takes them from there, and the host
// gets them behind it. Must not know: who drafts them, positions.
// Test: tests/model/engine/test_results.py, tests/gpu/test_same_text.py.

#pragma once

#include "llama/attachment.h"
#include "llama/device_rows.h"
#include "llama/fence.h"
#include "llama/fetched.h"
#include "tree/token_tree.h"
#include "verify/target_context.h"

#include <vector>

namespace draftwood {

// Whether a drafter's tokens need not come to the host: it finds its best by `head`, and all who look them up are on
// the head's device. lookups: weights that are read by token.
bool drafts_ahead(const attachment & drafter, const attachment & target, const ggml_tensor * head,
                  std::vector<const ggml_tensor *> lookups);

class ahead_tokens {
  public:
    // found where `backend` computes; copies: of its device, or nullptr. Throws failure.
    ahead_tokens(ggml_backend_t backend, row_copies copies);

    device_rows & rows() { return rows_; } // i32[1, DW_MAX_DRAFT]

    // Tokens [0, n) are the best ones of rows [first, first + n) of a decode. top: as results::device_top().
    void take(const ggml_tensor * top, int64_t first, int32_t n);
    // The first n are queued: they go on to the host.
    void send(int32_t n);
    // Fills in the nodes behind the root of a chain that was sent.
    void settle(token_tree & tree);
    // The first n are rows 1.. of a verify by `target`, which is queued behind this call.
    void feed(decode_request & verify, target_context & target, int32_t n) const;

  private:
    row_copies     copies_;
    device_rows    rows_;
    fetched_values on_host_;
    fence          done_; // found, not fetched
};

} // namespace draftwood
