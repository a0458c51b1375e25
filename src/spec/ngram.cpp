// N-gram drafting: see ngram.h.

#include "ngram.h"

#include <algorithm>

namespace draftwood {

void ngram_drafter::observe(const llama_token * tokens, int32_t n_tokens, llama_pos pos) {
    text_.resize(pos, LLAMA_TOKEN_NULL);
    text_.insert(text_.end(), tokens, tokens + n_tokens);
}

bool ngram_drafter::draft(llama_token last, llama_pos pos, int32_t max_draft, float, std::vector<llama_token> & out) {
    text_.resize(pos, LLAMA_TOKEN_NULL);
    text_.push_back(last);

    // the longest match of the text's end that ends before it, the newest of equals
    const int32_t n         = (int32_t) text_.size();
    int32_t       best      = min_match - 1;
    int32_t       best_next = 0;
    for (int32_t next = n - 1; next > best && best < max_match; --next) { // text_[next] followed the match
        int32_t length = 0;
        while (length < next && length < max_match && text_[next - 1 - length] == text_[n - 1 - length] &&
               text_[n - 1 - length] != LLAMA_TOKEN_NULL) {
            ++length;
        }
        if (length > best) {
            best      = length;
            best_next = next;
        }
    }
    if (best >= min_match) {
        // a match that overlaps the end goes on into the draft itself: a loop repeats
        for (int32_t i = 0; i < max_draft; ++i) {
            const int32_t     from  = best_next + i;
            const llama_token token = from < n ? text_[from] : out[from - n];
            if (token == LLAMA_TOKEN_NULL) {
                break;
            }
            out.push_back(token);
        }
    }
    text_.pop_back(); // `last` is observed once it is kept
    return true;
}

void ngram_drafter::trim(llama_pos n_keep) {
    text_.resize(std::min((size_t) n_keep, text_.size()));
}

} // namespace draftwood
