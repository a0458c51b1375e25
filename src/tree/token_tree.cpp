// See token_tree.h.

#include "tree/token_tree.h"

#include <algorithm>

namespace draftwood {

int32_t token_tree::height() const {
    return depths.empty() ? 0 : *std::max_element(depths.begin(), depths.end());
}

int32_t token_tree::child(int32_t node, int32_t token) const {
    for (int32_t i = node + 1; i < size(); ++i) {
        if (parents[i] == node && tokens[i] == token) {
            return i;
        }
    }
    return -1;
}

int32_t token_tree::add(int32_t parent, int32_t token, float log_prob) {
    const int32_t known = child(parent, token);
    if (known >= 0) {
        log_probs[known] = std::max(log_probs[known], log_prob);
        return known;
    }
    tokens.push_back(token);
    parents.push_back(parent);
    depths.push_back(depths[parent] + 1);
    log_probs.push_back(log_prob);
    return size() - 1;
}

std::vector<int32_t> token_tree::spine() const {
    std::vector<int32_t> nodes(1, 0);
    for (int32_t i = 1; i < size(); ++i) {
        if (parents[i] == nodes.back()) {
            nodes.push_back(i);
        }
    }
    return nodes;
}

bool token_tree::is_chain() const {
    for (int32_t i = 0; i < size(); ++i) {
        if (parents[i] != i - 1) {
            return false;
        }
    }
    return true;
}

token_tree checked_tree(const int32_t * tokens, const int32_t * parents, int32_t n, bool by_depth,
                        std::string & wrong) {
    token_tree tree;
    if (n < 1 || n > max_tree_nodes) {
        wrong = "a tree of " + std::to_string(n) + " nodes; expected 1 to " + std::to_string(max_tree_nodes);
        return tree;
    }
    if (parents[0] != -1) {
        wrong = "the root's parent is " + std::to_string(parents[0]) + "; expected -1";
        return tree;
    }
    tree = token_tree(tokens[0]);
    for (int32_t i = 1; i < n; ++i) {
        const std::string node = "the parent of node " + std::to_string(i) + " is " + std::to_string(parents[i]);
        if (parents[i] < 0 || parents[i] >= i) {
            wrong = node + "; expected a node before it";
            return {};
        }
        if (tree.child(parents[i], tokens[i]) >= 0) {
            wrong = node + ", which has a child with token " + std::to_string(tokens[i]) + " already; expected one";
            return {};
        }
        tree.add(parents[i], tokens[i], 0.0f);
        if (by_depth && tree.depths[i] < tree.depths[i - 1]) {
            wrong = node + ", less deep than that of node " + std::to_string(i - 1) + "; expected depth after depth";
            return {};
        }
    }
    return tree;
}

int32_t bucket(int32_t n) {
    for (const int32_t size : { 1, 2, 4, 8, 12, 16, 24, 32, 48 }) {
        if (n <= size) {
            return size;
        }
    }
    return max_tree_nodes;
}

} // namespace draftwood
