// The commit of a path of the last verify: see tree_state.h.

#include "llama/facts.h"
#include "llama/status.h"
#include "verify/tree_state.h"

#include <utility>

namespace draftwood {

void tree_state::keep(llama_seq_id seq, const token_tree & tree, const std::vector<int32_t> & path) {
    const verify_plan::sequence * rows = plan_.find(seq);
    if (!rows) {
        fail(DW_ERR_INTERNAL, "a commit of sequence %d, which the last verify did not hold", seq);
    }
    kept_ = kept_path{ memory_.state_cell(seq), plan_commit(plan_, *rows, tree, path) }; // others may have moved it
    for (const auto & each : devices_) {
        each->prepare_commit(kept_->cell);
    }
    const commit_plan & plan = kept_->plan;
    memory_.rename_cells(seq, plan.cells, rows->pos, plan.tokens, has_2d_positions(llama_get_model(target_)));
    memory_.set_state_pos(seq, rows->pos + (llama_pos) path.size() - 1);
}

void tree_state::commit() {
    if (!kept_) {
        fail(DW_ERR_INTERNAL, "a commit without a path that was kept");
    }
    const kept_path kept = *std::exchange(kept_, {});
    for (const auto & each : devices_) {
        each->commit(kept.cell, kept.plan.applied, kept.plan.moves, llama_n_threads(target_));
    }
}

} // namespace draftwood
