// See memory_mark.h.

#include "memory_mark.h"

#include "llama-context.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid.h"

#include <typeinfo>

namespace draftwood {

namespace {

// others hold more than these
bool is_known(const llama_memory_i & memory) {
    return typeid(memory) == typeid(llama_kv_cache) || typeid(memory) == typeid(llama_kv_cache_iswa) ||
           typeid(memory) == typeid(llama_memory_recurrent) || typeid(memory) == typeid(llama_memory_hybrid);
}

llama_memory_recurrent * recurrent_of(llama_memory_t memory) {
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid *>(memory)) {
        return hybrid->get_mem_recr();
    }
    return dynamic_cast<llama_memory_recurrent *>(memory);
}

} // namespace

int32_t own_cell(const llama_memory_recurrent & recurrent, llama_seq_id seq) {
    const int32_t cell = (size_t) seq < recurrent.cells.size() ? recurrent.cells[seq].tail : -1;
    const bool    own  = cell >= 0 && recurrent.cells[cell].src == cell && recurrent.cells[cell].seq_id.size() == 1;
    return own ? cell : -1;
}

memory_mark::memory_mark(llama_context * ctx, llama_seq_id seq, llama_pos pos) :
    ctx_(ctx),
    seq_(seq),
    pos_(pos) {
    llama_memory_t memory = llama_get_memory(ctx);
    can_restore_          = memory && is_known(*memory);
    if (const llama_memory_recurrent * recurrent = can_restore_ ? recurrent_of(memory) : nullptr;
        recurrent && pos > 0) {
        cell_        = own_cell(*recurrent, seq);
        can_restore_ = cell_ >= 0;
        last_        = cell_ >= 0 ? recurrent->cells[cell_].pos : -1;
        rs_          = recurrent->rs_idx.empty() ? 0 : recurrent->rs_idx[seq];
    }
}

// llama.cpp has tried, unless it threw; of a recurrent state it believes that nothing can be removed.
void memory_mark::restore() const {
    llama_memory_t memory = llama_get_memory(ctx_);
    if (cell_ < 0) {
        llama_memory_seq_rm(memory, seq_, pos_, -1);
        return;
    }
    llama_memory_recurrent & recurrent = *recurrent_of(memory);
    recurrent.cells[cell_].pos         = last_;
    if (!recurrent.rs_idx.empty()) {
        recurrent.set_rs_idx(seq_, rs_);
    }
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid *>(memory)) {
        hybrid->get_mem_attn()->seq_rm(seq_, pos_, -1);
    }
}

} // namespace draftwood
