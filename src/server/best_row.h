// Candidates for llama-server's samplers. A verify on a card leaves the best tokens of its rows (dw_best); a chain that
// begins with top-k decides among them as it would among the whole vocabulary. So no row's logits are copied and
// sorted. Included by common/sampling.cpp. Must not know: slots, rounds. Test: tests/server/test_best_rows.py.

#pragma once

#include "common.h"
#include "include/draftwood.h"
#include "log.h"

#include <algorithm>
#include <vector>

namespace draftwood {

// whether nothing but top-k comes first of what looks at all tokens
inline bool begins_with_few(const common_params_sampling & params) {
    const bool has_penalties =
        params.penalty_last_n != 0 &&
        (params.penalty_repeat != 1.0f || params.penalty_freq != 0.0f || params.penalty_present != 0.0f);
    if (params.mirostat != 0 || !params.logit_bias.empty() || params.min_keep > DW_MAX_BEST) {
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
    static const bool said = [] {
        LOG_INF("draftwood: samplers are given the best %d tokens of a row\n", DW_MAX_BEST);
        return true;
    }();
    (void) said;
    candidates.resize(DW_MAX_BEST);
    for (int i = 0; i < DW_MAX_BEST; ++i) {
        candidates[i] = { tokens[i], logits[i], 0.0f };
    }
    return true;
}

} // namespace draftwood
