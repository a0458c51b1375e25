// The C line of draft trees. Contract: draftwood.h.

#include "capi/capi.h"

#include <algorithm>
#include <cmath>
#include <string>

using namespace draftwood;

static_assert(DW_MAX_TREE == max_tree_nodes);

token_tree draftwood::from_native(const dw_tree & tree, bool by_depth) {
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

void draftwood::to_native(const token_tree & tree, dw_tree & out) {
    require_layout("dw_tree", out);
    const int32_t n = std::min(tree.size(), max_tree_nodes);
    out             = { sizeof(dw_tree), n, {}, {}, {} };
    std::copy_n(tree.tokens.begin(), n, out.tokens);
    std::copy_n(tree.parents.begin(), n, out.parents);
    std::copy_n(tree.log_probs.begin(), n, out.log_probs);
}

dw_status dw_propose_tree(dw_engine * engine, const dw_tree * tree) {
    return with(engine, "dw_propose_tree", [&](auto & e) {
        require("dw_propose_tree", tree);
        e.propose_tree(from_native(*tree, /*by_depth*/ true));
    });
}

dw_status dw_get_tree(dw_engine * engine, dw_tree * tree) {
    return guard([&] {
        require("dw_get_tree", engine, tree);
        engine->impl.fetch_draft();
        to_native(engine->impl.tree(), *tree);
        return DW_OK;
    });
}

const char * dw_tree_refusal(const dw_engine * engine) {
    return engine ? engine->impl.tree_refusal().c_str() : nullptr;
}
