// See memory_mark.h.

#include "memory_mark.h"

#include "llama-context.h"
#include "llama-memory-hybrid.h"

namespace draftwood {

namespace {

llama_memory_recurrent * recurrent_of(llama_context * ctx) {
    llama_memory_t memory = llama_get_memory(ctx);
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid *>(memory)) {
        return hybrid->get_mem_recr();
    }
    return dynamic_cast<llama_memory_recurrent *>(memory);
}

} // namespace

int32_t own_cell(const llama_memory_recurrent & recurrent, llama_seq_id seq) {
    const int32_t cell = (size_t) seq < recurrent.cells.size() ? recurrent.cells[seq].tail : -1;
    const bool    own  = cell >= 0 && recurrent.cells[cell].src == cell && recurrent.cells[cell].seq_id.size() == 1 &&
                     (recurrent.rs_idx.empty() || recurrent.rs_idx[seq] == 0);
    return own ? cell : -1;
}

memory_mark::memory_mark(llama_context * ctx, llama_seq_id seq, llama_pos pos) :
    ctx_(ctx),
    seq_(seq),
    pos_(pos) {
    const llama_memory_recurrent * recurrent = recurrent_of(ctx);
    if (recurrent && pos > 0) {
        cell_ = own_cell(*recurrent, seq);
        last_ = cell_ >= 0 ? recurrent->cells[cell_].pos : -1;
    }
    can_restore_ = !recurrent || pos == 0 || cell_ >= 0;
}

// llama.cpp has removed the positions where that is all; of a recurrent state it believes that they cannot be.
void memory_mark::restore() const {
    if (cell_ < 0) {
        return;
    }
    llama_memory_recurrent & recurrent = *recurrent_of(ctx_);
    recurrent.cells[cell_].pos         = last_;
    if (!recurrent.rs_idx.empty()) {
        recurrent.set_rs_idx(seq_, 0);
    }
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid *>(llama_get_memory(ctx_))) {
        hybrid->get_mem_attn()->seq_rm(seq_, pos_, -1);
    }
}

} // namespace draftwood
