// See sampling.h.

#include "round/sampling.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

namespace draftwood {

namespace {

// llama_sampler_sample asserts that the chain makes a choice.
llama_token chosen(llama_sampler * sampler, llama_token_data_array left) {
    llama_sampler_apply(sampler, &left);
    if (left.selected < 0 || (size_t) left.selected >= left.size) {
        fail(DW_ERR_ARGUMENT, "the sampler chose no token; expected a chain that ends in a choice");
    }
    const llama_token token = left.data[left.selected].id;
    llama_sampler_accept(sampler, token);
    return token;
}

// From the best tokens of a row alone, in the order of their logits.
llama_token sample_top(llama_sampler * sampler, const top_row & top) {
    std::array<llama_token_data, dw_n_top> best;
    for (size_t i = 0; i < best.size(); ++i) {
        best[i] = { top.tokens[i], top.logits[i], 0.0f };
    }
    return chosen(sampler, { best.data(), best.size(), -1, /*sorted*/ true });
}

// Memory for all tokens of a row, megabytes, which a thread keeps from one token of a text to the next. A sampler of
// the caller may sample from another context meanwhile: it gets memory of its own.
struct candidates {
    static thread_local std::vector<llama_token_data> kept;
    std::vector<llama_token_data>                     data;

    explicit candidates(size_t n) :
        data(std::move(kept)) {
        data.resize(n);
    }
    ~candidates() { kept = std::move(data); }
    candidates(const candidates &)             = delete;
    candidates & operator=(const candidates &) = delete;
};
thread_local std::vector<llama_token_data> candidates::kept;

// From all tokens of a row.
llama_token sample_all(llama_sampler * sampler, llama_context * ctx, int32_t row) {
    const float * logits = llama_get_logits_ith(ctx, row);
    if (!logits) {
        fail(DW_ERR_INTERNAL, "row %d has no logits", row);
    }
    candidates all(llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx))));
    for (llama_token token = 0; token < (llama_token) all.data.size(); ++token) {
        all.data[token] = { token, logits[token], 0.0f };
    }
    return chosen(sampler, { all.data.data(), all.data.size(), -1, /*sorted*/ false });
}

// Whether samplers of the context itself have worked on the row (llama_set_sampler).
bool is_sampled(llama_context * ctx, int32_t row) {
    return llama_get_sampled_token_ith(ctx, row) != LLAMA_TOKEN_NULL || llama_get_sampled_logits_ith(ctx, row);
}

} // namespace

llama_token sample_row(llama_sampler * sampler, target_context & target, int32_t row, int32_t n_enough,
                       bool & all_logits) {
    all_logits = n_enough == 0 || n_enough > dw_n_top || !target.newest_results().has_top();
    if (!all_logits) {
        return sample_top(sampler, target.newest_results().top(row));
    }
    return is_sampled(target.get(), row) ? llama_sampler_sample(sampler, target.get(), row)
                                         : sample_all(sampler, target.get(), row);
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
