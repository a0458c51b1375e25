// See ahead_tokens.h.

#include "drafters/ahead_tokens.h"

#include "draftwood.h"
#include "llama/facts.h"
#include "llama/tensor_bytes.h"

#include <cstring>

namespace draftwood {

bool drafts_ahead(const attachment & drafter, const attachment & target, const ggml_tensor * head,
                  std::vector<const ggml_tensor *> lookups) {
    const ggml_tensor * few    = drafter.head.few ? drafter.head.few : head;
    const bool          queued = drafter.async_inputs && target.async_inputs;
    lookups.push_back(head);
    return drafter.top_rows && target.top_rows && few && few->ne[1] >= dw_n_top && (queued || is_on_host(few)) &&
           are_together(lookups);
}

ahead_tokens::ahead_tokens(ggml_backend_t backend, row_copies copies) :
    copies_(copies),
    rows_(backend, 1, DW_MAX_DRAFT) {}

void ahead_tokens::take(const ggml_tensor * top, int64_t first, int32_t n) {
    std::vector<row_piece> pieces;
    for (int32_t i = 0; i < n; ++i) {
        if (copies_ && rows_.lies_beside(top)) {
            pieces.push_back(rows_.piece(i, top, first + i, 1));
        } else {
            rows_.copy(i, top, first + i, 1);
        }
    }
    if (!pieces.empty()) {
        copies_(rows_.backend(), pieces.data(), (int) pieces.size());
    }
}

void ahead_tokens::send(int32_t n) {
    done_.record(rows_.backend()); // the verify does not wait for what goes to the host
    on_host_.ask(rows_.backend(), copies_, rows_.tensor(), n * sizeof(llama_token));
}

void ahead_tokens::settle(token_tree & tree) {
    std::memcpy(tree.tokens.data() + 1, on_host_.get(), tree.n_drafts() * sizeof(llama_token));
}

void ahead_tokens::feed(decode_request & verify, target_context & target, int32_t n) const {
    done_.wait(target.newest_results().backend());
    verify.feeds.push_back(rows_.feed(row_feed::token, 1, 0, n, token_embeddings(llama_get_model(target.get()))));
}

} // namespace draftwood
