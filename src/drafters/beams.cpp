// See beams.h.

#include "drafters/beams.h"

#include "llama/memory.h"
#include "verify/attention_mask.h"

namespace draftwood {

int32_t beams::add(int32_t parent, llama_token token) {
    tokens_.push_back(token);
    parents_.push_back(parent);
    cells_.reserve(tokens_.size()); // placed() must not allocate
    ancestors_.push_back((parent < 0 ? 0 : ancestors_[parent]) | uint64_t(1) << (size() - 1));
    return size() - 1;
}

void beams::placed(const placed_rows & rows) noexcept {
    const size_t first = cells_.size();
    for (int64_t i = 0; i < rows.n; ++i) {
        cells_.push_back((uint32_t) (rows.cells[i] % n_stream_cells_));
    }
    for (int64_t i = 0; i < rows.n; ++i) {
        for (size_t j = 0; j < cells_.size(); ++j) {
            set_visible(rows.kq_mask, i, cells_[j], (ancestors_[first + i] >> j & 1) != 0);
        }
    }
}

int32_t beams::keep(llama_context * ctx, const llama_token * tokens, int32_t n) {
    uint64_t kept = 0;
    int32_t  last = -1, n_kept = 0;
    for (size_t i = 0; i < cells_.size() && n_kept < n; ++i) { // children come after their parents
        if (parents_[i] == last && tokens_[i] == tokens[n_kept]) {
            kept |= uint64_t(1) << i;
            last = (int32_t) i;
            n_kept++;
        }
    }
    std::vector<uint32_t> others;
    for (size_t i = 0; i < cells_.size(); ++i) {
        if (!(kept >> i & 1)) {
            others.push_back(cells_[i]);
        }
    }
    drop_cells(ctx, seq_, others);
    return n_kept;
}

} // namespace draftwood
