// Candidates for llama-server's samplers. A verify on a card leaves the best tokens of its rows (dw_best); a chain that
// begins with top-k decides among them as it would among the whole vocabulary. So no row's logits are copied and
// sorted. Included by common/sampling.cpp. Must not know: slots, rounds. Test: tests/server/test_best_rows.py.

#pragma once

#include "common.h"
#include "include/draftwood.h"
#include "log.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace draftwood {

// What is added to logits: by a request, and for tokens that the model never says.
inline std::vector<llama_logit_bias> biases_of(const llama_context * ctx, const common_params_sampling & params) {
    std::vector<llama_logit_bias> all = params.logit_bias;
    int32_t                       n   = 0;
    const llama_token * never = llama_vocab_get_suppress_tokens(llama_model_get_vocab(llama_get_model(ctx)), &n);
    for (int32_t i = 0; i < n; ++i) {
        all.push_back({ never[i], -INFINITY });
    }
    return all;
}

// Whether nothing but top-k comes first of what looks at all tokens. A bias that lowers logits brings no other token
// among the best, as long as enough of these are left: best_candidates counts them.
inline bool begins_with_few(const common_params_sampling & params) {
    const auto lowers = [](const llama_logit_bias & each) { return each.bias <= 0.0f; };
    const bool has_penalties =
        params.penalty_last_n != 0 &&
        (params.penalty_repeat != 1.0f || params.penalty_freq != 0.0f || params.penalty_present != 0.0f);
    if (params.mirostat != 0 || params.min_keep > DW_MAX_BEST ||
        !std::all_of(params.logit_bias.begin(), params.logit_bias.end(), lowers)) {
        return false;
    }
    for (common_sampler_type type : params.samplers) {
        const bool is_neutral = (type == COMMON_SAMPLER_TYPE_PENALTIES && !has_penalties) ||
                                (type == COMMON_SAMPLER_TYPE_DRY && params.dry_multiplier == 0.0f) ||
                                (type == COMMON_SAMPLER_TYPE_TOP_N_SIGMA && params.top_n_sigma <= 0.0f);
        if (!is_neutral) {
            return type == COMMON_SAMPLER_TYPE_TOP_K && params.top_k >= 1 && params.top_k <= DW_MAX_BEST;
        }
    }
    return false;
}

// Whether a request always takes the best token of a row. Biases that lower it are the exception.
inline bool takes_best(const common_params_sampling & params) {
    return params.temp <= 0.0f && common_grammar_value(params.grammar).empty() && begins_with_few(params);
}

// Puts candidates in the order that they have when `biases` are added, which the chain does. Returns how many of them
// have one.
inline int order_by(const std::vector<llama_logit_bias> & biases, std::vector<llama_token_data> & candidates) {
    int n = 0;
    for (llama_token_data & each : candidates) {
        each.p          = each.logit; // with its biases, for now
        bool has_a_bias = false;
        for (const llama_logit_bias & bias : biases) {
            if (bias.token == each.id) {
                each.p += bias.bias;
                has_a_bias = true;
            }
        }
        n += has_a_bias;
    }
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const llama_token_data & a, const llama_token_data & b) { return a.p > b.p; });
    for (llama_token_data & each : candidates) {
        each.p = 0.0f;
    }
    return n;
}

// Fills `candidates` with the best tokens of row idx, best first. Returns false if all logits are needed, or it has
// none.
inline bool best_candidates(const llama_context * ctx, int idx, const common_params_sampling & params,
                            std::vector<llama_token_data> & candidates) {
    llama_token tokens[DW_MAX_BEST];
    float       logits[DW_MAX_BEST];
    bool        found = false;
    if (!begins_with_few(params) || dw_best(ctx, idx, DW_MAX_BEST, tokens, logits, &found) != DW_OK || !found) {
        return false;
    }
    candidates.resize(DW_MAX_BEST);
    for (int i = 0; i < DW_MAX_BEST; ++i) {
        candidates[i] = { tokens[i], logits[i], 0.0f };
    }
    const std::vector<llama_logit_bias> biases = biases_of(ctx, params);
    if (!biases.empty() && DW_MAX_BEST - order_by(biases, candidates) < std::max(params.top_k, params.min_keep)) {
        return false;
    }
    static const bool said = [] {
        LOG_INF("draftwood: samplers are given the best %d tokens of a row\n", DW_MAX_BEST);
        return true;
    }();
    (void) said;
    return true;
}

} // namespace draftwood
