// Where sequences end in a llama_context's memory, to go back there from a decode that found no memory for its graph:
// nothing of it was computed, but its positions were taken. Must not know: drafts, rounds.
// Test: tests/model/engine/test_little_memory.py.

#pragma once

#include "llama.h"

class llama_memory_recurrent;

namespace draftwood {

class memory_mark {
  public:
    // of `seq`, whose next token goes to `pos`
    memory_mark(llama_context * ctx, llama_seq_id seq, llama_pos pos);

    // false: the sequence shares its recurrent state, or the memory is of a kind that is not known here
    bool can_restore() const { return can_restore_; }
    void restore() const;

  private:
    llama_context * ctx_;
    llama_seq_id    seq_;
    llama_pos       pos_;
    int32_t         cell_ = -1; // of the recurrent state; -1: positions are all there is to remove
    llama_pos       last_ = -1; // of that cell: not pos - 1 behind an image
    uint32_t        rs_   = 0;  // snapshot that the state is to be taken from
    bool            can_restore_;
};

// the cell that is of this sequence alone and that the next decode works on in place; -1: none
int32_t own_cell(const llama_memory_recurrent & recurrent, llama_seq_id seq);

} // namespace draftwood
