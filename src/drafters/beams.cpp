// See beams.h.

#include "drafters/beams.h"

#include "llama-kv-cache.h"
#include "verify/row_mask.h"

namespace draftwood {

int32_t beams::add(int32_t parent, llama_token token) {
    tokens_.push_back(token);
    parents_.push_back(parent);
    ancestors_.push_back((parent < 0 ? 0 : ancestors_[parent]) | uint64_t(1) << (size() - 1));
    return size() - 1;
}

void beams::placed(const dw_placed_rows & rows) noexcept {
    const size_t first = cells_.size();
    cells_.insert(cells_.end(), rows.cells, rows.cells + rows.n);
    for (int64_t i = 0; i < rows.n; ++i) {
        for (size_t j = 0; j < cells_.size(); ++j) {
            set_visible(rows.kq_mask, i, cells_[j], (ancestors_[first + i] >> j & 1) != 0);
        }
    }
}

int32_t beams::keep(llama_kv_cache & cache, const llama_token * tokens, int32_t n) {
    uint64_t kept = 0;
    int32_t  last = -1, n_kept = 0;
    for (size_t i = 0; i < cells_.size() && n_kept < n; ++i) { // children come after their parents
        if (parents_[i] == last && tokens_[i] == tokens[n_kept]) {
            kept |= uint64_t(1) << i;
            last = (int32_t) i;
            n_kept++;
        }
    }
    // the cells of the others get positions behind all: llama_kv_cache::seq_rm then frees them and moves its head back
    auto &          cells = const_cast<llama_kv_cells &>(cache.get_cells(0)); // it offers them read-only
    const llama_pos end   = cache.seq_pos_max(0) + 1;
    for (size_t i = 0; i < cells_.size(); ++i) {
        if (!(kept >> i & 1)) {
            cells.rm(cells_[i]);
            cells.pos_set(cells_[i], end);
            cells.seq_add(cells_[i], 0);
        }
    }
    cache.seq_rm(0, end, -1);
    return n_kept;
}

} // namespace draftwood
