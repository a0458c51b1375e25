// Trees of drafts that are drawn, not chosen, and the walk that is exact for them: the text follows the target's
// distribution, though not the draws of plain decoding. Children of a node are drawn from the drafter's distribution q
// without replacement; a child is taken with probability p/q, else p and q lose what it stood for.
// Source: recursive rejection sampling without replacement (arXiv:2402.14160, 2305.09781).
// Plain arithmetic; must not know: models, memory. Test: tests/unit/test_sampled_trees.py.

#pragma once

#include "tree/build.h"

#include <random>
#include <vector>

namespace draftwood {

using dice = std::mt19937_64;

struct weighted {
    int32_t token;
    double  weight;
};

// candidates with log-probabilities as weights that sum to 1
std::vector<weighted> distribution(const std::vector<candidate> & candidates);

// up to n distinct tokens of q, in the order in which they were drawn; none of weight 0
std::vector<int32_t> draw(std::vector<weighted> q, int32_t n, dice & rng);

// A token of distribution p, given `children` as draw() gave them from q: one of them or another. p, q sum to 1.
int32_t walk_sampled(std::vector<weighted> p, std::vector<weighted> q, const std::vector<int32_t> & children,
                     dice & rng);

// How many children the nodes of a tree have, decided before anything is drawn (else draws would be chosen by what they
// gave, and the walk were no longer exact): n nodes at most, none deeper than `depth`, and on a level at most `widest`
// that have children. By node in BFS order.
std::vector<int32_t> sampled_shape(int32_t n, int32_t depth, int32_t widest);

// A tree that is being drawn: how many children its nodes get, and what they were drawn from.
struct drawing {
    dice *                             rng = nullptr;
    std::vector<int32_t>               shape;  // by node in BFS order
    std::vector<std::vector<weighted>> offers; // by node; empty: it has no children

    int32_t children(int32_t node) const { return node < (int32_t) shape.size() ? shape[node] : 0; }
    // draw the children of the next node in BFS order from the candidates' probabilities
    void grow(token_tree & tree, int32_t node, const std::vector<candidate> & candidates);
};

} // namespace draftwood
