// Which sequence each cell of llama_memory_recurrent belongs to. A cell holds the state of one, or of several after a
// copy.
// Test: tests/model/engine/test_sequences.py, test_gaps.py.

#pragma once

#include "llama-memory-recurrent.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace draftwood {

// the cell that is of this sequence alone and that the next decode works on in place; -1: none
inline int32_t own_cell(const llama_memory_recurrent & recurrent, llama_seq_id seq) {
    const int32_t cell = (size_t) seq < recurrent.cells.size() ? recurrent.cells[seq].tail : -1;
    const bool    own  = cell >= 0 && recurrent.cells[cell].src == cell && recurrent.cells[cell].seq_id.size() == 1;
    return own ? cell : -1;
}

// Whether a decode of these sequences finds each state of the cells that it may exchange in its own cell, so that
// put_home() knows where they belong.
inline bool are_home(const llama_memory_recurrent & recurrent, const std::vector<llama_seq_id> & sequences) {
    int32_t first = INT32_MAX, last = -1;
    for (const llama_seq_id seq : sequences) {
        const int32_t cell = own_cell(recurrent, seq);
        if (cell < 0) {
            return false;
        }
        first = std::min(first, cell);
        last  = std::max(last, cell);
    }
    for (int32_t i = first; i <= last; ++i) {
        const auto is_rolled = [&](llama_seq_id seq) { return !recurrent.rs_idx.empty() && recurrent.rs_idx[seq] > 0; };
        const auto & held    = recurrent.cells[i].seq_id;
        if (!held.empty() && (recurrent.cells[i].src != i || std::any_of(held.begin(), held.end(), is_rolled))) {
            return false;
        }
    }
    return true;
}

inline void exchange(llama_memory_recurrent & recurrent, int32_t a, int32_t b) noexcept {
    auto & cells = recurrent.cells;
    std::swap(cells[a].pos, cells[b].pos);
    std::swap(cells[a].src0, cells[b].src0);
    cells[a].seq_id.swap(cells[b].seq_id);
    for (auto & each : cells) {
        each.tail = each.tail == a ? b : each.tail == b ? a : each.tail;
    }
}

// llama_memory_recurrent::find_slot has exchanged cells until those of the newest ubatch lie one after another, and
// llama.cpp's graph moves the states after them. A verify reads states where they are, and its graph moves none: each
// cell goes back to its state. After are_home(), and after the graph's inputs were set.
inline void put_home(llama_memory_recurrent & recurrent) noexcept {
    const auto first = (int32_t) recurrent.head, end = first + (int32_t) recurrent.n;
    for (int32_t i = first; i < end; ++i) {
        while (!recurrent.cells[i].is_empty() && recurrent.cells[i].src0 != i) {
            exchange(recurrent, i, recurrent.cells[i].src0);
        }
    }
    for (int32_t i = first; i < end; ++i) {
        recurrent.cells[i].src = recurrent.cells[i].is_empty() ? -1 : i;
    }
}

} // namespace draftwood
