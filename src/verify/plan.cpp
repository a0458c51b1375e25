// See plan.h.

#include "verify/plan.h"

#include <algorithm>
#include <cstddef>

namespace draftwood {

namespace {

void add_rows(verify_plan & plan, const token_tree & tree, int32_t first) {
    for (int32_t i = 0; i < plan.n_each; ++i) {
        const int32_t node   = std::min(i, tree.size() - 1);
        const int32_t parent = tree.parents[node];
        plan.parents.push_back(parent < 0 ? -1 : first + parent);
        plan.depths.push_back(tree.depths[node]);
        plan.ancestors.push_back((parent < 0 ? 0 : plan.ancestors[first + parent]) | uint64_t(1) << i);
    }
}

// rows in each row's subtree, by row of the sequence
std::vector<int32_t> subtree_sizes(const verify_plan & plan, int32_t first) {
    std::vector<int32_t> sizes(plan.n_each, 1);
    for (int32_t i = plan.n_each - 1; i >= 0; --i) {
        if (plan.parents[first + i] >= 0) {
            sizes[plan.parents[first + i] - first] += sizes[i];
        }
    }
    return sizes;
}

// The largest subtree is walked last: fewest states wait for a later child (ops/tree-delta-net/tree-plan.h).
void add_preorder(verify_plan & plan, int32_t first) {
    const std::vector<int32_t> sizes = subtree_sizes(plan, first);
    std::vector<int32_t>       open;
    const auto                 push_children = [&](int32_t parent) {
        const auto begin = (std::ptrdiff_t) open.size();
        for (int32_t row = first + plan.n_each - 1; row >= std::max(parent, first); --row) {
            if (plan.parents[row] == parent) {
                open.push_back(row);
            }
        }
        std::stable_sort(open.begin() + begin, open.end(),
                                         [&](int32_t a, int32_t b) { return sizes[a - first] > sizes[b - first]; });
    };
    push_children(-1); // copies of a root that is alone are roots, too
    while (!open.empty()) {
        const int32_t row = open.back();
        plan.preorder.push_back(row);
        open.pop_back();
        push_children(row);
    }
}

} // namespace

const verify_plan::sequence * verify_plan::find(int32_t seq) const {
    const auto is = [&](const sequence & each) { return each.seq == seq; };
    const auto it = std::find_if(sequences.begin(), sequences.end(), is);
    return it == sequences.end() ? nullptr : &*it;
}

verify_plan plan_verify(const std::vector<planned_tree> & trees, int32_t n_rows) {
    verify_plan plan;
    plan.n_each = n_rows;
    for (const planned_tree & each : trees) {
        const int32_t first = plan.n_rows();
        plan.sequences.push_back({ each.seq, each.pos, first });
        add_rows(plan, *each.tree, first);
        add_preorder(plan, first);
        plan.branches = plan.branches || n_rows > each.tree->size() || !each.tree->is_chain();
    }
    return plan;
}

commit_plan plan_commit(const verify_plan & verify, const verify_plan::sequence & rows, const token_tree & tree,
                        const std::vector<int32_t> & path) {
    commit_plan commit;
    commit.applied.push_back((int32_t) path.size());
    commit.moves.push_back(0);
    for (size_t k = 0; k < path.size(); ++k) {
        commit.tokens.push_back(tree.tokens[path[k]]);
        commit.applied.push_back(rows.first + path[k]);
        if (path[k] != (int32_t) k) {
            commit.moves[0]++;
            commit.moves.push_back((int32_t) verify.cells[rows.first + path[k]]);
            commit.moves.push_back((int32_t) verify.cells[rows.first + k]);
        }
    }
    for (int32_t i = 0; i < verify.n_each; ++i) {
        commit.cells.push_back((uint32_t) verify.stream_cell(rows.first + i));
    }
    return commit;
}

} // namespace draftwood
