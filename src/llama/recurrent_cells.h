// Whose the cells of llama_memory_recurrent are: one holds the state of a sequence, or of several after a copy.
// Test: tests/model/engine/test_sequences.py.

#pragma once

#include "llama-memory-recurrent.h"

#include <vector>

namespace draftwood {

// the cell that is of this sequence alone and that the next decode works on in place; -1: none
inline int32_t own_cell(const llama_memory_recurrent & recurrent, llama_seq_id seq) {
    const int32_t cell = (size_t) seq < recurrent.cells.size() ? recurrent.cells[seq].tail : -1;
    const bool    own  = cell >= 0 && recurrent.cells[cell].src == cell && recurrent.cells[cell].seq_id.size() == 1;
    return own ? cell : -1;
}

// Whether a decode of these sequences finds their cells one after another: else llama_memory_recurrent::find_slot
// swaps cells until they are, and the states follow in its graph.
inline bool are_in_order(const llama_memory_recurrent & recurrent, const std::vector<llama_seq_id> & sequences) {
    for (size_t i = 0; i < sequences.size(); ++i) {
        const int32_t cell = own_cell(recurrent, sequences[i]);
        if (cell < 0 || cell != own_cell(recurrent, sequences[0]) + (int32_t) i) {
            return false;
        }
    }
    return true;
}

} // namespace draftwood
