// Where sequences end in a llama_context's memory, to go back there from a decode that found no memory for its graph:
// nothing of it was computed, but its positions were taken. Must not know: drafts, rounds.
// Test: tests/model/engine/test_little_memory.py.

#pragma once

#include "llama.h"

#include <vector>

namespace draftwood {

// the rows of a sequence in a decode: from pos on
struct place {
    llama_seq_id seq;
    llama_pos    pos;
};

class memory_marks {
  public:
    // of the sequences of one decode, before it
    memory_marks(llama_context * ctx, const std::vector<place> & places);

    // false: the memory is of a kind that is not known here, or the decode moves recurrent states
    bool can_restore() const { return can_restore_; }

    // where can_restore() only
    void restore() const;

  private:
    struct mark {
        place     end;
        int32_t   cell = -1; // of the recurrent state; -1: positions are all there is to remove
        llama_pos last = -1; // of that cell: not pos - 1 behind an image
        uint32_t  rs   = 0;  // snapshot that the state is to be taken from
    };

    void mark_states(const std::vector<place> & places);

    llama_context *   ctx_;
    std::vector<mark> marks_;
    bool              can_restore_;
};

} // namespace draftwood
