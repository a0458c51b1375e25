// A sequence's memory in two versions, one row apart: as the newest decode left it, and behind a step that may turn out
// to be wrong. Recurrent layers write the step's state into a free cell and leave the old one's; the KV cache has a row
// more. Nothing is copied. Must not know: tokens, rounds. Test: tests/model/engine/test_queued_steps.py.

#pragma once

#include "llama.h"

namespace draftwood {

class memory_fork {
  public:
    // Whether the next decode of `seq` can be such a step. Its recurrent state, if it has one, must be its own, and the
    // context must have a cell and a sequence to spare.
    static bool is_possible(const llama_context * ctx, llama_seq_id seq);

    // before the step, of one row at `pos`; where is_possible()
    memory_fork(llama_context * ctx, llama_seq_id seq, llama_pos pos);

    void keep(); // the step stays
    void undo(); // it goes; no effect on a memory that others changed since

  private:
    llama_context * ctx_;
    llama_seq_id    seq_, spare_; // spare_ holds the old state meanwhile; -1: there is none
    llama_pos       pos_;
};

} // namespace draftwood
