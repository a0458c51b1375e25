// The commit of a path of the last verify: see tree_state.h.

#include "llama-context.h"
#include "llama-memory-hybrid.h"
#include "llama-model.h"
#include "llama/status.h"
#include "verify/tree_state.h"

#include <algorithm>

namespace draftwood {

// What the cells of a sequence hold after its rows were moved: those kept first, cell by cell; the others go. Set to
// positions behind it, llama_kv_cache::seq_rm finds them, and moves its head back as no other call does.
void tree_state::rename_cells(const open_rows & rows, const std::vector<llama_token> & kept) {
    llama_kv_cache & cache = *memory_->get_mem_attn();
    auto &           cells = const_cast<llama_kv_cells &>(cache.get_cells(rows.seq)); // it offers them read-only
    const bool       is_2d = llama_get_model(target_)->hparams.n_pos_per_embd() >= 3;
    const int32_t    n     = (int32_t) kept.size();
    for (int32_t i = 0; i < n_each_; ++i) {
        const uint32_t    cell  = (uint32_t) tree_column(3)[rows.first + i];
        const llama_pos   pos   = rows.pos + i;
        const llama_token token = i < n ? kept[i] : LLAMA_TOKEN_NULL;
        cells.rm(cell);
        cells.pos_set(cell, pos);
        cells.ext_set(cell, { is_2d ? pos : 0, is_2d ? pos : 0, token });
        cells.seq_add(cell, rows.seq);
    }
    if (n < n_each_) {
        cache.seq_rm(rows.seq, rows.pos + n, -1);
    }
}

void tree_state::commit(llama_seq_id seq, const token_tree & tree, const std::vector<int32_t> & path) {
    const auto rows = std::find_if(open_.begin(), open_.end(), [&](const open_rows & each) { return each.seq == seq; });
    if (rows == open_.end()) {
        fail(DW_ERR_INTERNAL, "a commit of sequence %d, which the last verify did not hold", seq);
    }
    const int32_t            tail = cell(seq);
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
    rename_cells(*rows, kept);
    memory_->get_mem_recr()->cells[tail].pos = rows->pos + (llama_pos) path.size() - 1;
}

} // namespace draftwood
