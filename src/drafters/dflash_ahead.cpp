// DFlash drafts that wait for nobody: those whose tokens stay on the device, and features that are taken behind a
// verify that still runs. See dflash.h.

#include "drafters/dflash.h"

#include <numeric>
#include <vector>

namespace draftwood {

// read_chain() of tokens that stay on the device: the tree holds the root's in their place until settle().
void dflash_drafter::leave_chain(const draft_request & request, int32_t n, token_tree & tree) {
    if (!ctx_.newest_results().has_top()) {
        fail(DW_ERR_MEMORY, "the drafter's graph found no memory for its best tokens");
    }
    drafted_.take(ctx_.newest_results().device_top(), /*first*/ 1, n);
    drafted_.send(n);
    for (int32_t i = 0; i < n; ++i) {
        tree.add(i, request.last, 0.0f);
    }
}

// The features of all rows of a verify go into the cache. What they are does not depend on what is kept.
bool dflash_drafter::begin_behind(llama_pos pos, int32_t n, bool /*greedy*/) {
    const int32_t n_rows = bucket(n);
    if (!begins_ || n_waiting_ > 0 || n_fed_ != pos || n_rows > max_tree_nodes || !has_room_for(n_rows) ||
        !ctx_.can_begin(seq_, n_rows)) {
        return false;
    }
    std::vector<int32_t> rows(n);
    std::iota(rows.begin(), rows.end(), 0);
    take_features(rows.data(), n);
    decode_request request;
    request.slot = drafter_context::slot(graph_kind::own_features, seq_);
    ctx_.batch().clear();
    add_features(request, 0, n, n_rows, /*output*/ true);
    n_begun_         = n;
    const int32_t rc = ctx_.try_to_decode(request);
    if (rc == 0) {
        ctx_.remove_from(seq_, n_fed_ + n); // rows of padding
    } else {
        forget_begun();
        begins_ = rc == 1; // else there is no memory; 1: no cells
    }
    return false;
}

// Rows of kept tokens stay; the others that begin_behind() fed go. Returns false if it fed none of these.
bool dflash_drafter::take_begun(const kept_rows & kept) {
    const bool fits =
        !kept.is_prompt && kept.pos == n_fed_ && kept.n <= n_begun_ && kept.rows[kept.n - 1] == kept.n - 1;
    if (!fits) {
        forget_begun();
        return false;
    }
    n_fed_ += kept.n;
    n_begun_ = 0;
    ctx_.remove_from(seq_, n_fed_);
    return true;
}

void dflash_drafter::forget_begun() {
    if (n_begun_ > 0) {
        n_begun_ = 0;
        ctx_.remove_from(seq_, n_fed_);
    }
}

} // namespace draftwood
