// The best tokens of each row of logits: see top-rows.h.

#include "ops/top-rows/top-rows.h"

#include <cmath>

namespace {

// those seen so far, best first
struct best_tokens {
    int32_t ids[dw::top_rows::max_k];
    float   logits[dw::top_rows::max_k];
    int64_t n = 0;

    static bool better(float a, float b) { return a > b || (std::isnan(b) && !std::isnan(a)); }

    // ids ascend, so that of equals the smaller one is there already
    void offer(int32_t id, float logit, int64_t k) {
        if (n == k && !better(logit, logits[n - 1])) {
            return;
        }
        int64_t at = n < k ? n++ : n - 1;
        for (; at > 0 && better(logit, logits[at - 1]); --at) {
            ids[at]    = ids[at - 1];
            logits[at] = logits[at - 1];
        }
        ids[at]    = id;
        logits[at] = logit;
    }
};

float log_sum_exp(const float * logits, int64_t n, float max) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; ++i) {
        if (!std::isnan(logits[i])) {
            sum += logits[i] == max ? 1.0f : std::exp(logits[i] - max); // infinities: no difference of theirs
        }
    }
    return (float) ((double) max + std::log(sum));
}

void run_top_rows(ggml_tensor * dst, int ith, int nth, void *) {
    const ggml_tensor * logits  = dst->src[dw::top_rows::logits];
    const ggml_tensor * named   = dst->src[dw::top_rows::tokens];
    const int32_t *     tokens  = named ? (const int32_t *) named->data : nullptr;
    const int64_t       n_vocab = logits->ne[0];
    const int64_t       k       = dw::top_rows::k_of(dst->ne[0]);
    for (int64_t row = ith; row < dst->ne[1]; row += nth) {
        const float *                  in = (const float *) ((const char *) logits->data + row * logits->nb[1]);
        const dw::top_rows::row_writer out((float *) ((char *) dst->data + row * dst->nb[1]), k);
        best_tokens                    best;
        for (int64_t i = 0; i < n_vocab; ++i) {
            best.offer((int32_t) i, in[i], k);
        }
        for (int64_t rank = 0; rank < k; ++rank) {
            out.token(rank, tokens ? tokens[best.ids[rank]] : best.ids[rank], best.logits[rank]);
        }
        const float max = std::isnan(best.logits[0]) ? -INFINITY : best.logits[0];
        out.sums(max, log_sum_exp(in, n_vocab, max));
    }
}

} // namespace

dw::top_rows::row_layout dw::top_rows::layout_of(int64_t k) {
    return layout_for(k);
}

const dw::op_descriptor dw::top_rows::on_cpu = { dw::top_rows::signature, run_top_rows };
