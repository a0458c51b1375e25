// See sequence_set.h.

#include "llama/sequence_set.h"

#include "llama-batch.h"
#include "llama-cparams.h"

namespace draftwood {

static_assert(sequence_set::max_sequences == LLAMA_MAX_SEQ);

// llama.cpp takes sequence 0 for rows that name none.
sequence_set sequences_of(const llama_batch & batch) noexcept {
    sequence_set set;
    if (!batch.seq_id || !batch.n_seq_id) {
        return set.add(0);
    }
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        for (int32_t j = 0; batch.seq_id[i] && j < batch.n_seq_id[i]; ++j) {
            set.add(batch.seq_id[i][j]);
        }
    }
    return set;
}

sequence_set sequences_of(const llama_batch_ext & batch) noexcept {
    sequence_set set;
    for (const auto & each : batch.tokens) {
        for (const llama_seq_id seq : each.seq_ids) {
            set.add(seq);
        }
    }
    return set;
}

int32_t n_rows_of(const llama_batch_ext & batch) noexcept {
    return (int32_t) batch.tokens.size();
}

} // namespace draftwood
