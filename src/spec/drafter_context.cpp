// A drafter's own llama_context: see drafter_context.h.

#include "drafter_context.h"

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
    return batch_.decode();
}

llama_context_params drafter_context::params_for(llama_context * target, llama_context_params params) {
    params.ctx_other  = target;
    params.n_ctx      = llama_n_ctx(target);
    params.n_seq_max  = 1;
    params.n_rs_seq   = 0;
    params.embeddings = false;
    return params;
}

drafter_context::drafter_context(llama_context * ctx, int32_t exact_rows) :
    ctx_(ctx),
    graphs_(ctx),
    batch_(ctx),
    n_vocab_(llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)))) {
    state_.exact_rows = exact_rows;
    state_.graphs     = &graphs_;
    dw_state_of(ctx)  = &state_;
}

drafter_context::~drafter_context() {
    dw_state_of(ctx_.get()) = nullptr;
}

llama_kv_cache & drafter_context::cache() const {
    return dynamic_cast<llama_kv_cache &>(*memory());
}

std::vector<candidate> drafter_context::candidates(const float * logits, float temperature) const {
    return most_probable(logits, n_vocab_, n_candidates, temperature > 0.0f ? temperature : greedy_temperature);
}

likeliest drafter_context::best(const float * logits, float path, float p_min) const {
    const float * best = std::max_element(logits, logits + n_vocab_);
    if (p_min > 0.0f) {
        float sum = 0.0f;
        for (int32_t i = 0; i < n_vocab_; ++i) {
            sum += std::exp(logits[i] - *best);
        }
        path /= sum;
    }
    return { (llama_token) (best - logits), path };
}

} // namespace draftwood
