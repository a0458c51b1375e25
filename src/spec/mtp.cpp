// MTP drafting: see mtp.h.

#include "mtp.h"

#include "llama-ext.h"

#include <algorithm>

namespace draftwood {

namespace {

constexpr int32_t n_single_max = 12; // pairs that are cheaper one by one than in a batch

llama_context * make_context(llama_context * target, llama_context_params params) {
    params               = drafter_context::params_for(target, params);
    params.ctx_type      = LLAMA_CONTEXT_TYPE_MTP;
    params.n_outputs_max = 1; // only single rows are asked for

    llama_context * ctx = llama_init_from_model(const_cast<llama_model *>(llama_get_model(target)), params);
    if (!ctx) {
        fail(DW_ERR_MEMORY, "no context for the MTP block could be made for n_ctx = %u: is there enough memory?",
             params.n_ctx);
    }
    return ctx;
}

} // namespace

mtp_drafter::mtp_drafter(llama_context * target, llama_context_params params, int32_t exact_rows) :
    target_(target),
    ctx_(make_context(target, params), exact_rows),
    n_embd_(llama_model_n_embd_out(llama_get_model(target))),
    n_rows_max_((int32_t) llama_n_ubatch(ctx_.get())) {
    hidden_.resize(n_embd_);
    llama_set_embeddings_nextn(target, true, /*masked*/ false);
    llama_set_embeddings_nextn(ctx_.get(), true, /*masked*/ true);
}

mtp_drafter::~mtp_drafter() {
    llama_set_embeddings_nextn(target_, false, /*masked*/ false);
}

void mtp_drafter::push(llama_token token, llama_pos pos, const float * hidden) {
    if (pos != queue_.pos + (llama_pos) queue_.tokens.size()) { // after a gap: the queue is one run of positions
        catch_up();
        queue_.pos = pos;
    }
    queue_.tokens.push_back(token);
    queue_.hidden.insert(queue_.hidden.end(), hidden, hidden + n_embd_);
}

void mtp_drafter::observe(const llama_token * tokens, int32_t n_tokens, llama_pos pos) {
    const float * hidden = llama_get_embeddings_nextn(target_); // f32[n_tokens][n_embd] of the last decode
    drop_cells_from(pos + n_tokens); // pairs of rejected drafts; those of accepted ones stay as they were drafted
    for (int32_t i = 0; i < n_tokens; ++i) {
        const llama_pos p = pos + i;
        // the hidden state before this token; where it is unknown (position 0, a gap) the pair is skipped
        const float * before = i > 0                  ? hidden + (size_t) (i - 1) * n_embd_
                               : hidden_pos_ == p - 1 ? hidden_.data()
                                                      : nullptr;
        if (p >= n_fed_ && before && p > 0) {
            push(tokens[i], p, before);
        }
    }
    std::copy_n(hidden + (size_t) (n_tokens - 1) * n_embd_, n_embd_, hidden_.begin());
    hidden_pos_ = pos + n_tokens - 1;

    // a prompt is fed at once; what a round accepted waits and rides along with the next draft
    while ((int32_t) queue_.tokens.size() > std::min(n_rows_max_, DW_MAX_DRAFT + 1)) {
        feed(std::min((int32_t) queue_.tokens.size(), n_rows_max_), /*output*/ false);
    }
}

// Decode the first n queued pairs, with output only for a single one: a masked context copies the first rows of
// its hidden states, not those asked for (llama-context.cpp, decode), so a batch would hand back a wrong one.
void mtp_drafter::feed(int32_t n, bool output) {
    ctx_.batch().clear();
    for (int32_t i = 0; i < n; ++i) {
        ctx_.batch().add(queue_.tokens[i], queue_.pos + i, output, queue_.hidden.data() + (size_t) i * n_embd_,
                         n_embd_);
    }
    const int32_t rc = ctx_.batch().decode();
    if (rc != 0) {
        fail(DW_ERR_DECODE, "llama_decode returned %d in the MTP block at positions %d..%d", rc, queue_.pos,
             queue_.pos + n - 1);
    }
    queue_.tokens.erase(queue_.tokens.begin(), queue_.tokens.begin() + n);
    queue_.hidden.erase(queue_.hidden.begin(), queue_.hidden.begin() + (size_t) n * n_embd_);
    queue_.pos += n;
    n_fed_ = queue_.pos;
}

// Feed all queued pairs. What a round accepted goes in pair by pair: one shape of graph, and for the few pairs of a
// round about as fast as a batch that builds its own (bench/LOG.md).
void mtp_drafter::catch_up() {
    while (!queue_.tokens.empty()) {
        const int32_t n = (int32_t) queue_.tokens.size();
        if (n <= n_single_max) {
            feed(1, /*output*/ true);
        } else {
            feed(std::min(n - 1, n_rows_max_), /*output*/ false); // the last one is needed with logits
        }
    }
}

bool mtp_drafter::draft(llama_token last, llama_pos pos, int32_t max_draft, float p_min,
                        std::vector<llama_token> & out) {
    if (pos == 0 || hidden_pos_ != pos - 1) {
        return false;
    }
    if (n_fed_ > pos) { // this very token was drafted from before, and its round never came
        drop_cells_from(pos);
    }
    push(last, pos, hidden_.data());
    catch_up();

    float              path = 1.0f;
    std::vector<float> hidden(n_embd_);
    for (int32_t i = 0; i < max_draft; ++i) {
        const likeliest best = ctx_.best(llama_get_logits_ith(ctx_.get(), -1), path, p_min);
        if (best.path < p_min) {
            break;
        }
        path = best.path;
        out.push_back(best.token);
        if (i + 1 == max_draft) {
            break;
        }
        std::copy_n(llama_get_embeddings_nextn_ith(ctx_.get(), -1), n_embd_, hidden.begin());
        ctx_.batch().clear();
        ctx_.batch().add(best.token, pos + 1 + i, true, hidden.data(), n_embd_);
        if (ctx_.batch().decode() != 0) {
            break; // the context's end: what is drafted so far stands
        }
    }
    n_fed_ = ctx_.end(); // the drafts' pairs stay: see observe
    return true;
}

void mtp_drafter::drop_cells_from(llama_pos pos) {
    ctx_.remove_from(pos);
    n_fed_ = std::min(n_fed_, pos);
}

void mtp_drafter::trim(llama_pos n_keep) {
    while (!queue_.tokens.empty() && queue_.pos + (llama_pos) queue_.tokens.size() > n_keep) {
        queue_.tokens.pop_back();
        queue_.hidden.resize(queue_.hidden.size() - n_embd_);
    }
    drop_cells_from(n_keep);
    if (hidden_pos_ != n_keep - 1) {
        hidden_pos_ = -1;
    }
}

std::vector<float> mtp_drafter::mark(llama_pos pos) const {
    return hidden_pos_ == pos - 1 ? hidden_ : std::vector<float>{};
}

void mtp_drafter::resume(llama_pos pos, const std::vector<float> & mark) {
    if (!mark.empty()) {
        hidden_     = mark;
        hidden_pos_ = pos - 1;
    }
}

void mtp_drafter::reset() {
    ctx_.clear();
    queue_      = {};
    n_fed_      = 0;
    hidden_pos_ = -1;
}

} // namespace draftwood
