// See batch.h.

#include "llama/batch.h"

#include "llama-batch.h"
#include "llama-model.h"

#include <new>

namespace draftwood {

llama_batch_ext * new_batch_of_feeds(llama_context * ctx) noexcept {
    constexpr size_t    n_values = 1; // of a row
    const llama_model * model    = llama_get_model(ctx);
    return new (std::nothrow) llama_batch_ext(
        llama_n_batch(ctx), n_values, n_values, (llama_seq_id) llama_n_seq_max(ctx), llama_get_memory(ctx),
        llama_vocab_n_tokens(llama_model_get_vocab(model)), model->hparams.n_pos_per_embd());
}

} // namespace draftwood
