// A drafter's own llama_context: see drafter_context.h.

#include "drafters/drafter_context.h"

#include "llama/decode.h"
#include "llama/facts.h"
#include "llama/graph_store.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace draftwood {

namespace {

constexpr int32_t n_candidates       = 8;    // a ninth is hardly ever right
constexpr int32_t rows_lost          = -4;   // beside llama_decode's
constexpr float   greedy_temperature = 1.0f; // for greedy requests: it says how often a token is the best

// One in so many tokens has a row in the short head. On cards a head is a smaller part of a round (bench/LOG.md: times
// measured, missed tokens estimated), and one that a round reads once is not worth a missed token.
int32_t part_of_vocab(bool on_gpu, head_reads reads) {
    if (!on_gpu) {
        return 8;
    }
    return reads == head_reads::each_token ? 4 : 1;
}

} // namespace

void drafter_context::begin_decode() {
    results_.forget();
    if (short_head_) {
        short_head_->settle(attached_.copies);
    }
}

int32_t drafter_context::decoded(int32_t rc) {
    if (rc == 0) {
        results_.decoded(/*is_read*/ false);
    }
    return results_.is_lost() ? rows_lost : rc;
}

int32_t drafter_context::try_to_decode(const decode_request & request) {
    begin_decode();
    const int32_t rc = draftwood::decode(attached_, request, batch_);
    if (!attached_.graphs->found_memory()) {
        attached_.graphs->unselect();
    }
    return decoded(rc);
}

int32_t drafter_context::decode(const decode_request & request) {
    begin_decode();
    int32_t rc = draftwood::decode(attached_, request, batch_);
    // No memory for a kept graph: once more, in the context's own (graph_store.h). Not for a level of a tree: the
    // decode that failed freed the cells of other branches.
    if (rc == -2 && !request.mask) {
        rc = draftwood::decode(attached_, request, batch_);
    }
    return decoded(rc);
}

bool drafter_context::can_begin(llama_seq_id seq, int32_t n_rows) const {
    return !short_of_memory() && n_rows + max_tree_nodes <= free_cells(ctx_.get(), seq);
}

bool drafter_context::short_of_memory() const {
    return attached_.graphs->short_of_memory();
}

llama_context_params drafter_context::params_for(llama_context * target, llama_context_params params) {
    params.ctx_other  = target;
    params.n_ctx      = llama_n_ctx(target);
    params.n_seq_max  = llama_n_seq_max(target);
    params.n_rs_seq   = 0;
    params.embeddings = false;
    params.samplers   = nullptr; // those of the target, each of which serves one context
    params.n_samplers = 0;
    return params;
}

drafter_context::drafter_context(llama_context * ctx, const logits_head & head, head_reads reads,
                                 const dw_params & params, std::shared_ptr<model_attachment> model, rows_have rows) :
    ctx_(ctx),
    attached_(ctx, params.exact_rows, /*listener*/ nullptr, std::move(model)),
    memory_(attached_.model->budget().drafter, context_bytes(ctx)),
    batch_(ctx, rows),
    results_(attached_, head.weights, params.results == DW_RESULTS_TOP) {
    attached_.rows_are_fed = rows == rows_have::feeds;
    if (!head.is_scaled) { // else its product is not the logits (short_logits.h)
        short_head_ = short_head::make(results_.backend(), head.weights, params.draft_vocab,
                                       part_of_vocab(results_.on_gpu(), reads), attached_.model->budget().drafter);
    }
    if (short_head_) {
        attached_.head = short_head_->rows();
        see_control_tokens();
    }
}

// They lie at the end of a vocabulary, so the head does not begin with them: the end of a turn, of thoughts, a call.
void drafter_context::see_control_tokens() {
    const llama_vocab * vocab = llama_model_get_vocab(llama_get_model(ctx_.get()));
    int32_t             left  = short_head_->size() / 4;
    for (llama_token token = 0; token < llama_vocab_n_tokens(vocab) && left > 0; ++token) {
        if (llama_vocab_get_attr(vocab, token) & (LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_USER_DEFINED)) {
            see(&token, 1);
            --left;
        }
    }
}

std::string drafter_key(const char * kind, const dw_params & params) {
    return std::string(kind) + " " + std::to_string(params.draft_vocab) + " " + std::to_string(params.results);
}

void drafter_context::see(const llama_token * tokens, int32_t n) {
    if (short_head_) {
        short_head_->see(tokens, n);
    }
}

llama_token drafter_context::token_of(int32_t logit) const {
    return results_.is_short() ? short_head_->token(logit) : logit;
}

std::vector<candidate> drafter_context::candidates(int32_t i, float temperature) {
    const float            t = temperature > 0.0f ? temperature : greedy_temperature;
    std::vector<candidate> found;
    if (!results_.has_top()) {
        const logit_row row = results_.logits(i);
        found               = most_probable(row.values, row.n, n_candidates, t);
        for (candidate & each : found) {
            each.token = token_of(each.token);
        }
    } else {
        const top_row row = results_.top(i);
        // at other temperatures the sum over the vocabulary is not known; tokens beside the best hardly count
        float sum = 0.0f;
        for (int64_t k = 0; k < dw_n_top; ++k) {
            sum += std::exp((row.logits[k] - row.logits[0]) / t);
        }
        const float log_sum = t == 1.0f ? row.log_sum : row.logits[0] / t + std::log(sum);
        for (int32_t k = 0; k < n_candidates; ++k) {
            found.push_back({ row.tokens[k], row.logits[k] / t - log_sum });
        }
    }
    return found;
}

likeliest drafter_context::best(int32_t i, float path, float p_min) {
    if (results_.has_top()) {
        const top_row row = results_.top(i);
        return { row.tokens[0], p_min > 0.0f ? path * std::exp(row.logits[0] - row.log_sum) : path };
    }
    const logit_row row  = results_.logits(i);
    const float *   best = std::max_element(row.values, row.values + row.n);
    if (p_min > 0.0f) {
        float sum = 0.0f;
        for (int32_t k = 0; k < row.n; ++k) {
            sum += std::exp(row.values[k] - *best);
        }
        path /= sum;
    }
    return { token_of((int32_t) (best - row.values)), path };
}

} // namespace draftwood
