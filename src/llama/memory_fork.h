// The memory of a hybrid model's sequence in two versions, one row apart: as the newest decode left it, and behind a
// step that may turn out to be wrong. The step's recurrent states go to a free cell, so those before it stay; the KV
// cache has a row more. A second sequence of the context holds the old cell meanwhile. Nobody else may use that
// sequence, or save or load any, before the fork has ended: target_context ends it for them. Must not know: tokens'
// meaning, rounds. Test: tests/model/engine/test_queued_steps.py.

#pragma once

#include "llama.h"

#include <cstdint>

class llama_memory_hybrid;
class llama_memory_recurrent;

namespace draftwood {

class memory_fork {
  public:
    // Whether the next decode of `seq` can be such a step: its recurrent state is its own, and the context has a cell
    // and a sequence to spare.
    static bool is_possible(const llama_context * ctx, llama_seq_id seq);

    // before the step, of one row at `pos`; where is_possible()
    memory_fork(llama_context * ctx, llama_seq_id seq, llama_pos pos);

    int32_t cell_before() const { return old_cell_; } // of the states before the step

    // The step has its cells and its graph is not built yet: no state needs to be cleared for it, as llama.cpp does for
    // a sequence that has none.
    void clear_nothing() noexcept;
    void keep(llama_token token); // the step stays, and its row was this token
    void undo() noexcept;         // the step goes. If others changed the sequence since, only the old state does

  private:
    llama_memory_hybrid &    memory() const;
    llama_memory_recurrent & states() const;
    bool                     is_whole() const; // nobody touched the sequence or the old state

    llama_context * ctx_;
    llama_seq_id    seq_, spare_;
    llama_pos       pos_;
    int32_t         old_cell_;
};

} // namespace draftwood
