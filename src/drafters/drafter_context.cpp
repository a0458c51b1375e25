// A drafter's own llama_context: see drafter_context.h.

#include "drafters/drafter_context.h"

#include "draftwood-testing.h"
#include "llama-ext.h"
#include "llama-kv-cache.h"

#include <algorithm>
#include <cmath>

namespace draftwood {

namespace {

constexpr int32_t n_candidates     = 8;    // a ninth is hardly ever right
constexpr float greedy_temperature = 1.0f; // at which a drafter's probability says how often the best token is this one

} // namespace

void tap_hidden(llama_context * target, bool on) {
    int32_t & users = dw_state_of(target)->n_hidden_users;
    users += on ? 1 : -1;
    llama_set_embeddings_nextn(target, users > 0, /*masked*/ false);
}

void tap_layer(llama_context * target, uint32_t layer, bool on) {
    int32_t & users = dw_state_of(target)->n_layer_users[layer];
    users += on ? 1 : -1;
    llama_set_embeddings_layer_inp(target, layer, users > 0);
}

int32_t drafter_context::decode_with(dw_row_mask & mask) {
    struct masked {
        dw_row_mask *& slot;
        ~masked() { slot = nullptr; }
    } until_it_ends{ state_.mask };
    state_.mask = &mask;
    return decode();
}

int32_t drafter_context::decode() {
    struct fed {
        dw_state & state;
        ~fed() { // also where it failed: they are not the next one's
            state.feeds.clear();
            dw_copy_inputs_for(nullptr);
        }
    } until_it_ends{ state_ };
    results_.forget();
    int32_t rc = batch_.decode();
    // No memory for a graph of its own: in the context's (graphs.h). Of a tree other branches' cells went with it.
    if (rc == -2 && !state_.mask) {
        rc = batch_.decode();
    }
    if (rc == 0) {
        results_.decoded();
    }
    return rc;
}

llama_context_params drafter_context::params_for(llama_context * target, llama_context_params params) {
    params.ctx_other  = target;
    params.n_ctx      = llama_n_ctx(target);
    params.n_seq_max  = 1;
    params.n_rs_seq   = 0;
    params.embeddings = false;
    return params;
}

drafter_context::drafter_context(llama_context * ctx, const ggml_tensor * head, const dw_params & params) :
    ctx_(ctx),
    graphs_(ctx),
    batch_(ctx),
    results_(ctx, state_, head, params.results == DW_RESULTS_TOP),
    n_vocab_(llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)))) {
    state_.exact_rows = params.exact_rows;
    state_.graphs     = &graphs_;
    state_.ours       = true;
    dw_state_of(ctx)  = &state_;
}

drafter_context::~drafter_context() {
    dw_state_of(ctx_.get()) = nullptr;
}

llama_kv_cache & drafter_context::cache() const {
    return dynamic_cast<llama_kv_cache &>(*memory());
}

std::vector<candidate> drafter_context::candidates(int32_t i, float temperature) {
    const float t = temperature > 0.0f ? temperature : greedy_temperature;
    if (!results_.has_top()) {
        return most_probable(llama_get_logits_ith(ctx_.get(), i), n_vocab_, n_candidates, t);
    }
    const top_row row = results_.top(i);
    // at other temperatures the sum over all is not known; what is not among the best hardly counts
    float sum = 0.0f;
    for (int64_t k = 0; k < dw_n_top; ++k) {
        sum += std::exp((row.logits[k] - row.logits[0]) / t);
    }
    const float            log_sum = t == 1.0f ? row.log_sum : row.logits[0] / t + std::log(sum);
    std::vector<candidate> found;
    for (int32_t k = 0; k < n_candidates; ++k) {
        found.push_back({ row.tokens[k], row.logits[k] / t - log_sum });
    }
    return found;
}

likeliest drafter_context::best(int32_t i, float path, float p_min) {
    if (results_.has_top()) {
        const top_row row = results_.top(i);
        return { row.tokens[0], p_min > 0.0f ? path * std::exp(row.logits[0] - row.log_sum) : path };
    }
    const float * logits = llama_get_logits_ith(ctx_.get(), i);
    const float * best   = std::max_element(logits, logits + n_vocab_);
    if (p_min > 0.0f) {
        float sum = 0.0f;
        for (int32_t token = 0; token < n_vocab_; ++token) {
            sum += std::exp(logits[token] - *best);
        }
        path /= sum;
    }
    return { (llama_token) (best - logits), path };
}

} // namespace draftwood
