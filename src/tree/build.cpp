// See build.h.

#include "tree/build.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <queue>

namespace draftwood {

namespace {

// children come after parents, so a set closed under parents stays so when the better of equals is the earlier
bool better(const token_tree & tree, int32_t a, int32_t b) {
    return tree.log_probs[a] != tree.log_probs[b] ? tree.log_probs[a] > tree.log_probs[b] : a < b;
}

// the best child of `node`; -1: none
int32_t best_child(const token_tree & tree, int32_t node) {
    int32_t best = -1;
    for (int32_t i = node + 1; i < tree.size(); ++i) {
        if (tree.parents[i] == node && (best < 0 || better(tree, i, best))) {
            best = i;
        }
    }
    return best;
}

// The tree of tree_from_positions() while it grows.
class position_tree {
  public:
    position_tree(int32_t root, const std::vector<std::vector<candidate>> & positions, float off_spine) :
        positions_(positions),
        off_spine_(off_spine),
        tree_(root) {}

    void add_spine(int32_t n_nodes) {
        for (int32_t depth = 0; depth < n_nodes && !positions_[depth].empty(); ++depth) {
            add(depth, positions_[depth][0]);
        }
    }

    // the most probable paths, up to `budget` nodes
    void add_best(int32_t budget) {
        for (int32_t i = 0; i < tree_.size(); ++i) {
            offer(i, i + 1 < tree_.size() ? 1 : 0); // what follows on the spine is there already
        }
        while (tree_.size() < budget && !open_.empty()) {
            const entry best = open_.top();
            open_.pop();
            const candidate & next = positions_[tree_.depths[best.parent]][best.rank];
            offer(best.parent, best.rank + 1);
            if (tree_.child(best.parent, next.token) < 0) { // a position may name a token twice
                add(best.parent, next);
                offer(tree_.size() - 1, 0);
            }
        }
    }

    const token_tree & tree() const { return tree_; }

  private:
    // what could come next: the rank-th candidate under a node
    struct entry {
        float   log_prob;
        int32_t parent, rank;
        bool    operator<(const entry & other) const {
            return log_prob != other.log_prob ? log_prob < other.log_prob : parent > other.parent;
        }
    };

    float path(int32_t parent, const candidate & next) const {
        return tree_.log_probs[parent] + next.log_prob + (on_spine_[parent] ? 0.0f : off_spine_);
    }

    void add(int32_t parent, const candidate & next) {
        const bool is_best = next.token == positions_[tree_.depths[parent]][0].token;
        tree_.add(parent, next.token, path(parent, next));
        on_spine_.push_back(on_spine_[parent] && is_best);
    }

    void offer(int32_t parent, int32_t rank) {
        const size_t depth = tree_.depths[parent];
        if (depth < positions_.size() && rank < (int32_t) positions_[depth].size()) {
            open_.push({ path(parent, positions_[depth][rank]), parent, rank });
        }
    }

    const std::vector<std::vector<candidate>> & positions_;
    float                                       off_spine_;
    token_tree                                  tree_;
    std::vector<bool>                           on_spine_{ true }; // on the path of all bests
    std::priority_queue<entry>                  open_;
};

} // namespace

std::vector<candidate> most_probable(const float * logits, int32_t n_vocab, int32_t n, float temperature) {
    n = std::min(n, n_vocab);
    std::vector<candidate> best; // a sorted list: few enter it
    const auto             before = [](const candidate & a, const candidate & b) { return a.log_prob > b.log_prob; };
    for (int32_t i = 0; i < n_vocab; ++i) {
        if ((int32_t) best.size() == n && !(logits[i] > best.back().log_prob)) {
            continue;
        }
        const candidate next{ i, logits[i] };
        best.insert(std::upper_bound(best.begin(), best.end(), next, before), next);
        if ((int32_t) best.size() > n) {
            best.pop_back();
        }
    }
    if (best.empty()) {
        return best;
    }
    const float largest = best[0].log_prob;
    float       sum     = 0.0f;
    for (int32_t i = 0; i < n_vocab; ++i) {
        sum += std::exp((logits[i] - largest) / temperature);
    }
    const float log_sum = std::log(sum);
    for (candidate & each : best) {
        each.log_prob = (each.log_prob - largest) / temperature - log_sum;
    }
    return best;
}

token_tree tree_from_positions(int32_t root, const std::vector<std::vector<candidate>> & positions, int32_t budget,
                               int32_t spine, float off_spine) {
    position_tree grown(root, positions, off_spine);
    grown.add_spine(std::min({ spine, budget - 1, (int32_t) positions.size() }));
    grown.add_best(budget);
    return grown.tree();
}

void merge(token_tree & tree, const token_tree & other) {
    std::vector<int32_t> place(other.tokens.size(), 0);
    for (int32_t i = 1; i < other.size(); ++i) {
        place[i] = tree.add(place[other.parents[i]], other.tokens[i], other.log_probs[i]);
    }
}

token_tree select(const token_tree & tree, int32_t budget, int32_t spine) {
    std::vector<bool> kept(tree.tokens.size(), false);
    int32_t           n_kept = 0;
    for (int32_t i = 0, n = 0; i >= 0 && n <= spine && n_kept < budget; i = best_child(tree, i), ++n) {
        kept[i] = true;
        n_kept++;
    }
    // best first; a node waits until its parent is in
    std::vector<int32_t> order(tree.tokens.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return better(tree, a, b); });
    for (bool grown = true; grown && n_kept < budget;) {
        grown = false;
        for (const int32_t i : order) {
            if (!kept[i] && (i == 0 || kept[tree.parents[i]])) {
                kept[i] = grown = true;
                n_kept++;
                break;
            }
        }
    }

    token_tree           out(tree.tokens[0]);
    std::vector<int32_t> from(1, 0); // by node of `out`
    for (int32_t node = 0; node < out.size(); ++node) {
        for (const int32_t i : order) {
            if (i != 0 && kept[i] && tree.parents[i] == from[node]) {
                out.add(node, tree.tokens[i], tree.log_probs[i]);
                from.push_back(i);
            }
        }
    }
    return out;
}

std::vector<double> beside_spine(const token_tree & tree, int32_t n_spine) {
    std::vector<double> out;
    const auto          spine = tree.spine();
    for (int32_t i = 1; i < tree.size(); ++i) {
        const int32_t depth = tree.depths[i];
        if (depth > n_spine || depth >= (int32_t) spine.size() || spine[depth] != i) {
            out.push_back(std::exp((double) tree.log_probs[i]));
        }
    }
    std::sort(out.rbegin(), out.rend());
    return out;
}

} // namespace draftwood
