// See memory_marks.h.

#include "llama/memory_marks.h"

#include "llama-context.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid.h"

#include <typeinfo>

namespace draftwood {

namespace {

// other kinds hold more than what is marked here
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

memory_marks::memory_marks(llama_context * ctx, const std::vector<place> & places) :
    ctx_(ctx),
    places_(places) {
    llama_memory_t memory = llama_get_memory(ctx);
    can_restore_          = memory && is_known(*memory);
    if (const llama_memory_recurrent * recurrent = can_restore_ ? recurrent_of(memory) : nullptr) {
        states_ = { recurrent->cells, recurrent->rs_idx, recurrent->head, recurrent->used };
    }
}

// llama.cpp removes a failed batch's positions itself, unless it threw, but none from a recurrent state.
void memory_marks::restore() const {
    llama_memory_t memory = llama_get_memory(ctx_);
    if (llama_memory_recurrent * recurrent = recurrent_of(memory)) {
        recurrent->cells  = states_.cells;
        recurrent->rs_idx = states_.rs_idx;
        recurrent->head   = states_.head;
        recurrent->used   = states_.used;
    }
    const auto *     hybrid = dynamic_cast<const llama_memory_hybrid *>(memory);
    llama_memory_i * cells  = hybrid ? hybrid->get_mem_attn() : recurrent_of(memory) ? nullptr : memory;
    for (const place & each : places_) {
        if (cells) {
            cells->seq_rm(each.seq, each.pos, -1);
        }
    }
}

} // namespace draftwood
