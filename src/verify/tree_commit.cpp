// The commit of a path of the last verify: see tree_state.h.

#include "llama/facts.h"
#include "llama/status.h"
#include "verify/tree_state.h"

#include <algorithm>

namespace draftwood {

void tree_state::commit(llama_seq_id seq, const token_tree & tree, const std::vector<int32_t> & path) {
    const auto rows = std::find_if(open_.begin(), open_.end(), [&](const open_rows & each) { return each.seq == seq; });
    if (rows == open_.end()) {
        fail(DW_ERR_INTERNAL, "a commit of sequence %d, which the last verify did not hold", seq);
    }
    const int32_t            tail = memory_.state_cell(seq);
    std::vector<llama_token> kept;
    std::vector<int32_t>     applied(1, (int32_t) path.size()), moves(1, 0);
    for (size_t k = 0; k < path.size(); ++k) {
        kept.push_back(tree.tokens[path[k]]);
        applied.push_back(rows->first + path[k]);
        if (path[k] != (int32_t) k) {
            moves[0]++;
            moves.push_back((int32_t) cells_[rows->first + path[k]]);
            moves.push_back((int32_t) cells_[rows->first + k]);
        }
    }
    for (const auto & each : devices_) {
        each->commit(tail, applied, moves, llama_n_threads(target_));
    }
    const int32_t * cells = tree_column(3) + rows->first;
    memory_.rename_cells(seq, { cells, cells + n_each_ }, rows->pos, kept, has_2d_positions(llama_get_model(target_)));
    memory_.set_state_pos(seq, rows->pos + (llama_pos) path.size() - 1);
}

} // namespace draftwood
