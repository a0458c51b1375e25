// See sampling.h.

#include "round/sampling.h"

#include <algorithm>
#include <array>

namespace draftwood {

namespace {

// From the best tokens of a row alone, in the order of their logits.
llama_token sample_top(llama_sampler * sampler, const top_row & top) {
    std::array<llama_token_data, dw_n_top> best;
    for (size_t i = 0; i < best.size(); ++i) {
        best[i] = { top.tokens[i], top.logits[i], 0.0f };
    }
    llama_token_data_array left{ best.data(), best.size(), -1, /*sorted*/ true };
    llama_sampler_apply(sampler, &left);
    if (left.selected < 0) {
        fail(DW_ERR_ARGUMENT, "the sampler chose no token; expected a chain that ends in a choice");
    }
    const llama_token token = left.data[left.selected].id;
    llama_sampler_accept(sampler, token);
    return token;
}

} // namespace

llama_token sample_row(llama_sampler * sampler, target_context & target, int32_t row, int32_t n_enough,
                       bool & all_logits) {
    all_logits = n_enough == 0 || n_enough > dw_n_top || !target.left().has_top();
    return all_logits ? llama_sampler_sample(sampler, target.get(), row) : sample_top(sampler, target.left().top(row));
}

llama_token scheduled_token(const token_tree & tree, int32_t node, bool accept, llama_token sampled, int32_t n_vocab) {
    const std::vector<int32_t> spine = tree.spine();
    const auto                 here  = std::find(spine.begin(), spine.end(), node);
    if (accept && here != spine.end() && here + 1 != spine.end()) {
        return tree.tokens[*(here + 1)];
    }
    while (tree.child(node, sampled) >= 0) {
        sampled = sampled > 0 ? sampled - 1 : n_vocab - 1;
    }
    return sampled;
}

} // namespace draftwood
