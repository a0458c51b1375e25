// The commit of a path of the last verify: see tree_state.h.

#include "llama/facts.h"
#include "llama/status.h"
#include "verify/tree_state.h"

namespace draftwood {

void tree_state::commit(llama_seq_id seq, const token_tree & tree, const std::vector<int32_t> & path) {
    const verify_plan::sequence * rows = plan_.find(seq);
    if (!rows) {
        fail(DW_ERR_INTERNAL, "a commit of sequence %d, which the last verify did not hold", seq);
    }
    const commit_plan plan = plan_commit(plan_, *rows, tree, path);
    for (const auto & each : devices_) {
        each->prepare_commit(memory_.state_cell(seq)); // a plain step of others may have moved the state
        each->commit(memory_.state_cell(seq), plan.applied, plan.moves, llama_n_threads(target_));
    }
    memory_.rename_cells(seq, plan.cells, rows->pos, plan.tokens, has_2d_positions(llama_get_model(target_)));
    memory_.set_state_pos(seq, rows->pos + (llama_pos) path.size() - 1);
}

} // namespace draftwood
