// See memory_fork.h.

#include "llama/memory_fork.h"

#include "llama-context.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama/recurrent_cells.h"

#include <algorithm>
#include <typeinfo>

namespace draftwood {

namespace {

// nullptr: a KV cache alone
llama_memory_recurrent * recurrent_of(const llama_context * ctx) {
    const auto * hybrid = dynamic_cast<const llama_memory_hybrid *>(llama_get_memory(ctx));
    return hybrid ? hybrid->get_mem_recr() : nullptr;
}

// a sequence without a state; -1: all have one
llama_seq_id find_spare(const llama_memory_recurrent & recurrent) {
    const auto n = (llama_seq_id) recurrent.cells.size();
    for (llama_seq_id seq = 0; seq < n; ++seq) {
        if (recurrent.cells[seq].tail < 0) {
            return seq;
        }
    }
    return -1;
}

bool has_free_cell(const llama_memory_recurrent & recurrent) {
    return std::any_of(recurrent.cells.begin(), recurrent.cells.end(),
                       [](const auto & each) { return each.is_empty(); });
}

} // namespace

bool memory_fork::is_possible(const llama_context * ctx, llama_seq_id seq) {
    const llama_memory_i * memory = llama_get_memory(ctx);
    if (!memory) {
        return false;
    }
    if (typeid(*memory) == typeid(llama_kv_cache) || typeid(*memory) == typeid(llama_kv_cache_iswa)) {
        return true;
    }
    const llama_memory_recurrent * recurrent = recurrent_of(ctx);
    return recurrent && recurrent->n_rs_seq == 0 && own_cell(*recurrent, seq) >= 0 && find_spare(*recurrent) >= 0 &&
           has_free_cell(*recurrent);
}

// llama.cpp writes the next state of a sequence that shares its cell into another one, as after a copy of sequences.
memory_fork::memory_fork(llama_context * ctx, llama_seq_id seq, llama_pos pos) :
    ctx_(ctx),
    seq_(seq),
    spare_(-1),
    pos_(pos) {
    if (llama_memory_recurrent * recurrent = recurrent_of(ctx)) {
        spare_ = find_spare(*recurrent);
        recurrent->seq_cp(seq, spare_, -1, -1);
    }
}

void memory_fork::keep() {
    if (spare_ >= 0) {
        recurrent_of(ctx_)->seq_rm(spare_, -1, -1);
    }
}

void memory_fork::undo() {
    llama_memory_t memory = llama_get_memory(ctx_);
    const bool     as_was = llama_memory_seq_pos_max(memory, seq_) == pos_;
    if (spare_ < 0) {
        if (as_was) {
            llama_memory_seq_rm(memory, seq_, pos_, -1);
        }
        return;
    }
    auto *                   hybrid    = dynamic_cast<llama_memory_hybrid *>(memory);
    llama_memory_recurrent * recurrent = hybrid->get_mem_recr();
    if (as_was && recurrent->seq_pos_max(spare_) == pos_ - 1) {
        hybrid->get_mem_attn()->seq_rm(seq_, pos_, -1);
        recurrent->seq_rm(seq_, -1, -1);
        recurrent->seq_cp(spare_, seq_, -1, -1);
    }
    recurrent->seq_rm(spare_, -1, -1);
}

} // namespace draftwood
