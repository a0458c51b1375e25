// Draft trees of the MTP block, level by level: see mtp.h.

#include "drafters/mtp.h"

#include <algorithm>
#include <cmath>

namespace draftwood {

namespace {

// whether a node with this path may be among the `budget` most probable
bool may_enter(const token_tree & tree, float path, int32_t budget) {
    const auto better = [path](float other) { return other > path; };
    return std::count_if(tree.log_probs.begin(), tree.log_probs.end(), better) < budget;
}

} // namespace

// Of a level's nodes those that are worth a row of the next decode: those that may be among the budget's most probable,
// or are the path that is kept in any case, the first node of its level.
std::vector<mtp_drafter::leaf> mtp_drafter::best_leaves(const token_tree & tree, std::vector<leaf> leaves,
                                                        const draft_request & request) const {
    const int32_t kept     = !leaves.empty() && tree.depths[leaves[0].node] <= request.spine ? leaves[0].node : -1;
    const auto    hopeless = [&](const leaf & each) {
        return each.node != kept && !may_enter(tree, tree.log_probs[each.node], request.budget);
    };
    leaves.erase(std::remove_if(leaves.begin(), leaves.end(), hopeless), leaves.end());
    std::stable_sort(leaves.begin(), leaves.end(),
                     [&](const leaf & a, const leaf & b) { return tree.log_probs[a.node] > tree.log_probs[b.node]; });
    const int32_t free = ctx_.n_positions() - (request.pos + 1 + beams_.size()); // cells
    const int32_t most = std::min({ request.width, widest, max_tree_nodes - beams_.size(), std::max(0, free) });
    leaves.resize(std::min<size_t>(leaves.size(), most));
    return leaves;
}

// The children of a node, whose row is this output of the last decode. keep_best: in any case the first one.
void mtp_drafter::grow(const draft_request & request, int32_t node, int32_t output, bool keep_best, token_tree & tree) {
    for (const candidate & each : ctx_.candidates(output, request.temperature)) {
        const float path = tree.log_probs[node] + each.log_prob;
        if (path < std::log(request.p_min) || (!keep_best && !may_enter(tree, path, request.budget))) {
            break;
        }
        tree.add(node, each.token, path);
        keep_best = false;
    }
}

// Level by level: the leaves that are worth a row are decoded together, each seeing its ancestors only, and their
// candidates are the next level's nodes.
void mtp_drafter::draft_tree(const draft_request & request, token_tree & tree) {
    std::vector<leaf> level(1, { 0, -1, 0 }); // the root's row is decoded already
    for (int32_t depth = 1; depth <= request.depth; ++depth) {
        std::vector<leaf> next;
        for (int32_t i = 0; i < (int32_t) level.size(); ++i) {
            const int32_t first = tree.size();
            grow(request, level[i].node, depth == 1 ? -1 : i, /*keep_best*/ i == 0 && depth <= request.spine, tree);
            for (int32_t child = first; child < tree.size(); ++child) {
                next.push_back({ child, row_of(level, i), i });
            }
        }
        level = best_leaves(tree, std::move(next), request);
        if (level.empty() || depth == request.depth || !decode_level(level, request, tree)) {
            break;
        }
    }
    n_fed_ = request.pos + 1; // observe() counts those that stay
}

// of the i-th of the level decoded last, in beams_
int32_t mtp_drafter::row_of(const std::vector<leaf> & level, int32_t i) const {
    return level[0].node == 0 ? -1 : beams_.size() - (int32_t) level.size() + i;
}

bool mtp_drafter::decode_level(const std::vector<leaf> & level, const draft_request & request,
                               const token_tree & tree) {
    ctx_.batch().clear();
    decode_request next;
    next.mask = &beams_;
    next.slot = drafter_context::slot(graph_kind::rows, seq_);
    for (int32_t i = 0; i < (int32_t) level.size(); ++i) {
        beams_.add(level[i].row, tree.tokens[level[i].node]);
        add_row(tree.tokens[level[i].node], request.pos + tree.depths[level[i].node], true);
        next.feeds.push_back(hidden_feed(i, shared_->outputs, level[i].output, 1));
    }
    const bool decoded = decode(next, (int32_t) level.size());
    if (!decoded) {
        drop_cells_from(request.pos + 1);
    }
    return decoded;
}

} // namespace draftwood
