// See memory_marks.h.

#include "llama/memory_marks.h"

#include "llama-context.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama/recurrent_cells.h"

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

memory_marks::memory_marks(llama_context * ctx, const std::vector<place> & places) :
    ctx_(ctx) {
    for (const place & each : places) {
        marks_.push_back({ each });
    }
    llama_memory_t memory = llama_get_memory(ctx);
    can_restore_          = memory && is_known(*memory);
    if (can_restore_ && recurrent_of(memory)) {
        mark_states(places);
    }
}

// A sequence that begins has no state yet; alone it gets a cell and loses it again.
void memory_marks::mark_states(const std::vector<place> & places) {
    const llama_memory_recurrent & recurrent = *recurrent_of(llama_get_memory(ctx_));
    std::vector<llama_seq_id>      sequences;
    for (const place & each : places) {
        sequences.push_back(each.seq);
    }
    const bool begins = places.size() == 1 && places[0].pos == 0;
    can_restore_      = begins || are_in_order(recurrent, sequences);
    for (mark & each : marks_) {
        if (can_restore_ && !begins) {
            each.cell = own_cell(recurrent, each.end.seq);
            each.last = recurrent.cells[each.cell].pos;
            each.rs   = recurrent.rs_idx.empty() ? 0 : recurrent.rs_idx[each.end.seq];
        }
    }
}

// llama.cpp has tried, unless it threw; of a recurrent state it believes that nothing can be removed.
void memory_marks::restore() const {
    llama_memory_t memory = llama_get_memory(ctx_);
    for (const mark & each : marks_) {
        if (each.cell < 0) {
            llama_memory_seq_rm(memory, each.end.seq, each.end.pos, -1);
            continue;
        }
        llama_memory_recurrent & recurrent = *recurrent_of(memory);
        recurrent.cells[each.cell].pos     = each.last;
        if (!recurrent.rs_idx.empty()) {
            recurrent.set_rs_idx(each.end.seq, each.rs);
        }
        if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid *>(memory)) {
            hybrid->get_mem_attn()->seq_rm(each.end.seq, each.end.pos, -1);
        }
    }
}

} // namespace draftwood
