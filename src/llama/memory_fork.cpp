// See memory_fork.h.

#include "llama/memory_fork.h"

#include "llama-context.h"
#include "llama-memory-hybrid.h"
#include "llama/recurrent_cells.h"

#include <algorithm>
#include <typeinfo>
#include <utility>

namespace draftwood {

namespace {

// The last sequence without a state; -1: all have one. Who makes room for steps adds a sequence behind those in use.
llama_seq_id find_spare(const llama_memory_recurrent & states) {
    auto seq = (llama_seq_id) states.cells.size() - 1;
    while (seq >= 0 && states.cells[seq].tail >= 0) {
        --seq;
    }
    return seq;
}

bool has_free_cell(const llama_memory_recurrent & states) {
    return std::any_of(states.cells.begin(), states.cells.end(), [](const auto & each) { return each.is_empty(); });
}

} // namespace

// Subclasses of llama_memory_hybrid have caches beside it.
bool memory_fork::is_possible(const llama_context * ctx, llama_seq_id seq) {
    const llama_memory_i * memory = llama_get_memory(ctx);
    if (!memory || typeid(*memory) != typeid(llama_memory_hybrid)) {
        return false;
    }
    const llama_memory_recurrent & states = *static_cast<const llama_memory_hybrid *>(memory)->get_mem_recr();
    return states.n_rs_seq == 0 && own_cell(states, seq) >= 0 && find_spare(states) >= 0 && has_free_cell(states);
}

// llama.cpp writes the next state of a sequence that shares its cell into another one, as after a copy of sequences.
memory_fork::memory_fork(llama_context * ctx, llama_seq_id seq, llama_pos pos) :
    ctx_(ctx),
    seq_(seq),
    spare_(find_spare(states())),
    pos_(pos),
    old_cell_(own_cell(states(), seq)) {
    states().seq_cp(seq, spare_, -1, -1);
}

llama_memory_hybrid & memory_fork::memory() const {
    return *static_cast<llama_memory_hybrid *>(llama_get_memory(ctx_));
}

llama_memory_recurrent & memory_fork::states() const {
    return *memory().get_mem_recr();
}

void memory_fork::clear_nothing() noexcept {
    states().rs_z = -1;
}

bool memory_fork::is_whole() const {
    const auto & cells = states().cells;
    return cells[spare_].tail == old_cell_ && cells[old_cell_].pos == pos_ - 1 && own_cell(states(), seq_) >= 0 &&
           llama_memory_seq_pos_max(llama_get_memory(ctx_), seq_) == pos_;
}

void memory_fork::keep(llama_token token) {
    if (states().cells[spare_].tail == old_cell_) {
        states().seq_rm(spare_, -1, -1);
    }
    auto &       cells = const_cast<llama_kv_cells &>(memory().get_mem_attn()->get_cells(seq_));
    const auto & rows  = cells.seq_pos_get(seq_);
    if (!rows.empty() && rows.rbegin()->first == pos_) {
        const uint32_t    cell = rows.rbegin()->second;
        llama_kv_cell_ext row  = cells.ext_get(cell);
        row.tok                = token;
        cells.ext_set(cell, row);
    }
}

// seq_cp would ask for memory.
void memory_fork::undo() noexcept {
    auto & cells = states().cells;
    if (is_whole()) {
        memory().get_mem_attn()->dw_remove_from(seq_, pos_);
        states().seq_rm(seq_, -1, -1);
        auto holder    = cells[old_cell_].seq_id.extract(spare_);
        holder.value() = seq_;
        cells[old_cell_].seq_id.insert(std::move(holder));
        cells[seq_].tail   = old_cell_;
        cells[spare_].tail = -1;
    } else if (cells[spare_].tail == old_cell_) {
        states().seq_rm(spare_, -1, -1);
    }
}

} // namespace draftwood
