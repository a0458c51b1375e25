// Which candidates of the drafters make up a tree worth verifying. Must not know: models, memory, times.
// Source: best-first trees of DDTree and EAGLE-2 (arXiv:2406.16858).
// Test: tests/unit/test_tree.py.

#pragma once

#include "tree/token_tree.h"

namespace draftwood {

struct candidate {
    int32_t token;
    float   log_prob;
};

// The n most probable tokens of logits f32[n_vocab], best first, equals in order of their ids, with their
// log-probabilities at `temperature` (> 0) over the whole vocabulary.
std::vector<candidate> most_probable(const float * logits, int32_t n_vocab, int32_t n, float temperature);

// A tree after `root` of at most `budget` nodes from distributions that know their position only (a block drafter):
// positions[d] are the candidates at depth d + 1, best first. `spine` nodes of the path of all bests first, then the
// most probable paths. Under a node beside the path of all bests the next position's distribution holds less:
// `off_spine` < 0 is added to the log-probability of each step there.
token_tree tree_from_positions(int32_t root, const std::vector<std::vector<candidate>> & positions, int32_t budget,
                               int32_t spine, float off_spine);

// `other`'s nodes into `tree`, which has the same root; what both have is folded
void merge(token_tree & tree, const token_tree & other);

// The `budget` nodes of `tree` with the most probable paths, in BFS order, siblings best first. A node never comes
// without its ancestors; of the most probable path the first `spine` nodes after the root are kept in any case.
token_tree select(const token_tree & tree, int32_t budget, int32_t spine);

// Probabilities of the paths to the nodes that are not among the first `n_spine` of the spine after the root, best
// first.
std::vector<double> beside_spine(const token_tree & tree, int32_t n_spine);

} // namespace draftwood
