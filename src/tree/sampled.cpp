// See sampled.h.

#include "tree/sampled.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace draftwood {

namespace {

double sum(const std::vector<weighted> & values) {
    return std::accumulate(values.begin(), values.end(), 0.0,
                           [](double s, const weighted & w) { return s + w.weight; });
}

void normalise(std::vector<weighted> & values) {
    const double total = sum(values);
    for (weighted & each : values) {
        each.weight = total > 0.0 ? each.weight / total : 0.0;
    }
}

double of(const std::vector<weighted> & values, int32_t token) {
    for (const weighted & each : values) {
        if (each.token == token) {
            return each.weight;
        }
    }
    return 0.0;
}

double toss(dice & rng) {
    return std::uniform_real_distribution<double>(0.0, 1.0)(rng);
}

// its place; weights sum to `total`
size_t pick(const std::vector<weighted> & values, double total, dice & rng) {
    double left = toss(rng) * total;
    size_t last = values.size();
    for (size_t i = 0; i < values.size(); ++i) {
        if (values[i].weight > 0.0) {
            last = i;
            left -= values[i].weight;
            if (left < 0.0) {
                break;
            }
        }
    }
    return last;
}

} // namespace

std::vector<weighted> distribution(const std::vector<candidate> & candidates) {
    std::vector<weighted> q;
    for (const candidate & each : candidates) {
        q.push_back({ each.token, std::exp((double) each.log_prob) });
    }
    normalise(q);
    return q;
}

std::vector<int32_t> draw(std::vector<weighted> q, int32_t n, dice & rng) {
    std::vector<int32_t> drawn;
    while ((int32_t) drawn.size() < n) {
        const size_t at = pick(q, sum(q), rng);
        if (at == q.size()) {
            break;
        }
        drawn.push_back(q[at].token);
        q.erase(q.begin() + at);
    }
    return drawn;
}

int32_t walk_sampled(std::vector<weighted> p, std::vector<weighted> q, const std::vector<int32_t> & children,
                     dice & rng) {
    for (const int32_t child : children) {
        const double wanted = of(p, child), offered = of(q, child);
        if (toss(rng) * offered < wanted) {
            return child;
        }
        std::vector<weighted> rest = p;
        for (weighted & each : rest) {
            each.weight = std::max(0.0, each.weight - of(q, each.token));
        }
        if (sum(rest) <= 0.0) { // q is p but for rounding
            break;
        }
        p = std::move(rest);
        normalise(p);
        q.erase(std::remove_if(q.begin(), q.end(), [&](const weighted & each) { return each.token == child; }),
                q.end());
        normalise(q);
    }
    return p[pick(p, sum(p), rng)].token;
}

std::vector<int32_t> sampled_shape(int32_t n, int32_t depth, int32_t widest) {
    // how often the first, second, third.. draw is taken, about: decides where nodes go, never whether they are right
    static const std::vector<candidate> ranks = {
        { 0, std::log(0.55f) }, { 1, std::log(0.15f) }, { 2, std::log(0.07f) }, { 3, std::log(0.04f) }
    };
    const std::vector<std::vector<candidate>> positions(std::clamp(depth, 0, max_tree_nodes - 1), ranks);
    const token_tree                          tree = select(tree_from_positions(-1, positions, n, 0, 0.0f), n, 0);
    std::vector<int32_t>                      children(tree.size(), 0), parents_at(tree.height() + 1, 0);
    std::vector<bool>                         kept(tree.size(), true);
    std::vector<int32_t>                      shape;
    for (int32_t i = 1; i < tree.size(); ++i) {
        const int32_t parent = tree.parents[i];
        const bool    first  = children[parent] == 0;
        kept[i]              = kept[parent] && !(first && parents_at[tree.depths[parent]] == widest);
        if (kept[i]) {
            parents_at[tree.depths[parent]] += first ? 1 : 0;
            children[parent]++;
        }
    }
    for (int32_t i = 0; i < tree.size(); ++i) {
        if (kept[i]) {
            shape.push_back(children[i]);
        }
    }
    return shape;
}

void drawing::grow(token_tree & tree, int32_t node, const std::vector<candidate> & candidates) {
    offers.resize(std::max(offers.size(), (size_t) node + 1));
    offers[node] = distribution(candidates);
    for (const int32_t token : draw(offers[node], children(node), *rng)) {
        tree.add(node, token, tree.log_probs[node] + (float) std::log(of(offers[node], token)));
    }
}

} // namespace draftwood
