// The C line of draft trees. Contract: draftwood.h.

#include "capi/capi.h"
#include "tree/build.h"

#include <algorithm>
#include <cmath>
#include <string>

using namespace draftwood;

namespace {

static_assert(DW_MAX_TREE == max_tree_nodes);

token_tree from_native(const dw_tree & tree, bool by_depth) {
    require_layout("dw_tree", tree);
    std::string wrong;
    token_tree  out = checked_tree(tree.tokens, tree.parents, tree.n, by_depth, wrong);
    if (!wrong.empty()) {
        fail(DW_ERR_ARGUMENT, "%s", wrong.c_str());
    }
    if (!std::all_of(tree.log_probs, tree.log_probs + tree.n, [](float each) { return std::isfinite(each); })) {
        fail(DW_ERR_ARGUMENT, "a tree with a log-probability that is no number; expected all of them finite");
    }
    std::copy_n(tree.log_probs, tree.n, out.log_probs.begin());
    return out;
}

void to_native(const token_tree & tree, dw_tree & out) {
    require_layout("dw_tree", out);
    const int32_t n = std::min(tree.size(), max_tree_nodes);
    out             = { sizeof(dw_tree), n, {}, {}, {} };
    std::copy_n(tree.tokens.begin(), n, out.tokens);
    std::copy_n(tree.parents.begin(), n, out.parents);
    std::copy_n(tree.log_probs.begin(), n, out.log_probs);
}

void require_budget(int32_t budget) {
    if (budget < 1 || budget > max_tree_nodes) {
        fail(DW_ERR_ARGUMENT, "a budget of %d nodes; expected 1 to %d", budget, max_tree_nodes);
    }
}

} // namespace

dw_status dw_propose_tree(dw_engine * engine, const dw_tree * tree) {
    return with(engine, "dw_propose_tree", [&](auto & e) {
        require("dw_propose_tree", tree);
        e.propose_tree(from_native(*tree, /*by_depth*/ true));
    });
}

dw_status dw_set_temperature(dw_engine * engine, float temperature) {
    return with(engine, "dw_set_temperature", [&](auto & e) {
        if (!(temperature >= 0.0f && std::isfinite(temperature))) {
            fail(DW_ERR_ARGUMENT, "temperature is %g; expected 0 (greedy) or more", temperature);
        }
        e.set_temperature(temperature);
    });
}

dw_status dw_get_tree(dw_engine * engine, dw_tree * tree) {
    return guard([&] {
        require("dw_get_tree", engine, tree);
        to_native(engine->impl.tree(), *tree);
        return DW_OK;
    });
}

const char * dw_tree_refusal(const dw_engine * engine) {
    return engine ? engine->impl.tree_refusal().c_str() : nullptr;
}

int64_t dw_tree_bytes(const dw_engine * engine) {
    return engine ? engine->impl.tree_bytes() : 0;
}

dw_status dw_tree_from_positions(int32_t root, const int32_t * tokens, const float * log_probs, int32_t n_positions,
                                 int32_t n_each, int32_t budget, int32_t spine, float beside, dw_tree * tree) {
    return guard([&] {
        require("dw_tree_from_positions", tokens, log_probs, tree);
        require_budget(budget);
        if (n_positions < 0 || n_each < 0) {
            fail(DW_ERR_ARGUMENT, "%d positions of %d candidates; expected 0 or more", n_positions, n_each);
        }
        std::vector<std::vector<candidate>> positions(n_positions);
        for (int32_t d = 0; d < n_positions; ++d) {
            for (int32_t i = 0; i < n_each; ++i) {
                positions[d].push_back({ tokens[d * n_each + i], log_probs[d * n_each + i] });
            }
        }
        to_native(tree_from_positions(root, positions, budget, spine, beside), *tree);
        return DW_OK;
    });
}

dw_status dw_tree_merge(dw_tree * tree, const dw_tree * other) {
    return guard([&] {
        require("dw_tree_merge", tree, other);
        token_tree       merged = from_native(*tree, /*by_depth*/ false);
        const token_tree added  = from_native(*other, /*by_depth*/ false);
        if (merged.tokens[0] != added.tokens[0]) {
            fail(DW_ERR_ARGUMENT, "trees with the roots %d and %d; expected one root", merged.tokens[0],
                 added.tokens[0]);
        }
        merge(merged, added);
        if (merged.size() > max_tree_nodes) {
            fail(DW_ERR_ARGUMENT, "%d nodes in both trees; expected up to %d", merged.size(), max_tree_nodes);
        }
        to_native(merged, *tree);
        return DW_OK;
    });
}

dw_status dw_tree_select(const dw_tree * tree, int32_t budget, int32_t spine, dw_tree * selected) {
    return guard([&] {
        require("dw_tree_select", tree, selected);
        require_budget(budget);
        to_native(select(from_native(*tree, /*by_depth*/ false), budget, spine), *selected);
        return DW_OK;
    });
}

int32_t dw_tree_bucket(int32_t n_nodes) {
    return bucket(n_nodes);
}
