// A tree of draft tokens: which token may follow which. Node 0 is the last emitted token, a chain is a tree.
// Plain arithmetic: no llama or ggml types; must not know drafters, models, memory. Test: tests/unit/test_tree.py.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace draftwood {

constexpr int32_t max_tree_nodes = 64; // root included; an ancestor set is one word

// Nodes in an order in which parents come first: parents[i] < i, parents[0] = -1. What is verified is in BFS order.
struct token_tree {
    std::vector<int32_t> tokens;
    std::vector<int32_t> parents;
    std::vector<int32_t> depths;    // of the root: 0
    std::vector<float>   log_probs; // of the path to the node, in the drafter's opinion; of the root: 0

    token_tree() = default;
    explicit token_tree(int32_t root) :
        tokens{ root },
        parents{ -1 },
        depths{ 0 },
        log_probs{ 0.0f } {}

    int32_t size() const { return (int32_t) tokens.size(); }
    int32_t n_drafts() const { return size() - 1; }
    int32_t height() const; // of the deepest node

    // the child of `node` with this token; -1: none
    int32_t child(int32_t node, int32_t token) const;

    // A child of `parent` after all other nodes. One that is there already is returned, with the larger of the two
    // probabilities.
    int32_t add(int32_t parent, int32_t token, float log_prob);

    // the path of the first child of each node, root included: of a tree that build.h made the most probable
    std::vector<int32_t> spine() const;

    bool is_chain() const; // every node the child of the one before
};

// The tree of tokens i32[n] and parents i32[n], if it is one of up to max_tree_nodes, parents first; `by_depth`: in BFS
// order. Otherwise an empty tree, and what is wrong.
token_tree checked_tree(const int32_t * tokens, const int32_t * parents, int32_t n, bool by_depth, std::string & wrong);

// the smallest of 1, 2, 4, 8, 12, 16, 24, 32, 48, 64 that holds n nodes: graphs of few sizes are replayed more often
int32_t bucket(int32_t n);

} // namespace draftwood
