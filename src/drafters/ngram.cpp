// N-gram drafting: see ngram.h.

#include "drafters/ngram.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace draftwood {

namespace {

constexpr float goes_on = 0.7f; // probability that a match, and each token of it, goes on as it did

} // namespace

void ngram_drafter::observe(const kept_rows & kept) {
    text_.resize(kept.pos, LLAMA_TOKEN_NULL);
    text_.insert(text_.end(), kept.tokens, kept.tokens + kept.n);
}

// What followed from text_[next] on. A match that overlaps the end goes on into the draft itself: a loop repeats.
void ngram_drafter::follow(int32_t next, int32_t depth, float log_prob, token_tree & tree) const {
    const int32_t        n    = (int32_t) text_.size();
    int32_t              node = 0;
    std::vector<int32_t> drafted;
    for (int32_t i = 0; i < depth; ++i) {
        const int32_t     from  = next + i;
        const llama_token token = from < n ? text_[from] : drafted[from - n];
        if (token == LLAMA_TOKEN_NULL) {
            break;
        }
        node = tree.add(node, token, tree.log_probs[node] + (i == 0 ? log_prob : std::log(goes_on)));
        drafted.push_back(token);
    }
}

draft_result ngram_drafter::draft(const draft_request & request, token_tree & tree) {
    text_.resize(request.pos, LLAMA_TOKEN_NULL);
    text_.push_back(request.last);

    // matches of the text's end that end before it: the longest, the newest of equals; for a tree other ones, too
    const int32_t                            n = (int32_t) text_.size();
    std::vector<std::pair<int32_t, int32_t>> matches; // length, where it goes on
    for (int32_t next = n - 1; next >= min_match; --next) {
        int32_t length = 0;
        while (length < next && length < max_match && text_[next - 1 - length] == text_[n - 1 - length] &&
               text_[n - 1 - length] != LLAMA_TOKEN_NULL) {
            ++length;
        }
        if (length >= min_match) {
            matches.push_back({ length, next });
        }
        if (length == max_match && request.budget == 0) {
            break;
        }
    }
    const auto longer = [](const auto & a, const auto & b) { return a.first > b.first; };
    std::stable_sort(matches.begin(), matches.end(), longer);
    const size_t n_used = std::min<size_t>(matches.size(), request.budget == 0 ? 1 : max_branches);
    for (size_t i = 0; i < n_used; ++i) {
        follow(matches[i].second, request.depth, std::log(goes_on / (float) (i + 1)), tree);
    }
    text_.pop_back(); // `last` is observed once it is kept
    return draft_result::drafted;
}

void ngram_drafter::trim(llama_pos n_keep) {
    text_.resize(std::min((size_t) n_keep, text_.size()));
}

} // namespace draftwood
