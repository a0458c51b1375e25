// Where sequences end in a llama_context's memory, to go back there from a decode that found no memory for its graph:
// nothing of it was computed, but its positions were taken. Must not know: drafts, rounds.
// Test: tests/model/engine/test_little_memory.py.

#pragma once

#include "llama-memory-recurrent.h"
#include "llama.h"

#include <cstdint>
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

    // false: the memory is of a kind that is not known here
    bool can_restore() const { return can_restore_; }

    // Call only if can_restore(). May be called after each failed attempt.
    void restore() const;

  private:
    // Whose the cells of recurrent states are. llama.cpp exchanges them before it computes anything.
    struct state_cells {
        std::vector<llama_memory_recurrent::mem_cell> cells;
        std::vector<uint32_t>                         rs_idx;
        uint32_t                                      head = 0, used = 0;
    };

    llama_context *    ctx_;
    std::vector<place> places_;
    state_cells        states_;
    bool               can_restore_;
};

} // namespace draftwood
