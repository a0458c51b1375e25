// Sequences of a llama_context, as those of a batch that somebody decodes. Test: tests/model/engine/test_others.py.

#pragma once

#include "llama.h"

#include <bitset>

struct llama_batch_ext;

namespace draftwood {

class sequence_set {
  public:
    static constexpr llama_seq_id max_sequences = 256; // llama.cpp's LLAMA_MAX_SEQ

    static sequence_set all() noexcept { return sequence_set().add_all(); }
    // -1: all
    static sequence_set of(llama_seq_id seq) noexcept { return seq < 0 ? all() : sequence_set().add(seq); }

    bool has(llama_seq_id seq) const noexcept { return seq >= 0 && seq < max_sequences && bits_[seq]; }

    // An id out of range is ignored.
    sequence_set & add(llama_seq_id seq) noexcept {
        if (seq >= 0 && seq < max_sequences) {
            bits_[seq] = true;
        }
        return *this;
    }

  private:
    sequence_set & add_all() noexcept {
        bits_.set();
        return *this;
    }

    std::bitset<max_sequences> bits_;
};

// of the batch's rows
sequence_set sequences_of(const llama_batch & batch) noexcept;
sequence_set sequences_of(const llama_batch_ext & batch) noexcept;

int32_t n_rows_of(const llama_batch_ext & batch) noexcept;

} // namespace draftwood
