// See input_size.h.

#include "server/input_size.h"

#include <algorithm>
#include <atomic>
#include <cctype>

namespace draftwood {

namespace {

constexpr size_t part_size  = 1 << 20; // bytes that are tokenised together; smaller texts are not looked at
constexpr size_t most_times = 2000;    // llama.cpp's MAX_REPETITION_THRESHOLD: beyond it a grammar does not parse

std::atomic<int32_t> most_tokens{ 0 };

bool inside_character(unsigned char byte) {
    return (byte & 0xC0) == 0x80;
}

// The larger number of "{n}" or "{n,m}" at `at`, and in `at` its end.
size_t times(const std::string & text, size_t & at) {
    size_t most = 0, number = 0;
    for (++at; at < text.size() && text[at] != '}'; ++at) {
        const bool digit = std::isdigit((unsigned char) text[at]) != 0;
        number           = digit ? std::min(most_times, number * 10 + (size_t) (text[at] - '0')) : 0;
        most             = std::max(most, number);
    }
    return most;
}

} // namespace

// An item is what a repetition repeats: a string, a class, a group or a rule. A repeated item has so many elements.
void check_grammar(const std::string & grammar) {
    refuse_more("bytes of grammar", grammar.size(), most_grammar);
    size_t depth = 0, n_rules = 0, n_elements = 0, item = 1;
    for (size_t at = 0; at < grammar.size();) {
        const size_t begin = at;
        switch (grammar[at]) {
            case '#':
                at = std::min(grammar.size(), grammar.find_first_of("\r\n", at));
                break;
            case '"':
                at   = past(grammar, at, '"');
                item = at - begin;
                break;
            case '[':
                at   = past(grammar, at, ']');
                item = at - begin;
                break;
            case '{':
                item = (item + 3) * times(grammar, at);
                n_elements += item;
                break;
            default:
                depth += grammar[at] == '(' ? 1 : 0;
                depth -= grammar[at] == ')' && depth > 0 ? 1 : 0;
                n_rules += grammar.compare(at, 3, "::=") == 0 ? 1 : 0;
                item = std::isalnum((unsigned char) grammar[at]) ? 1 : item;
                ++at;
        }
        refuse_more("groups in each other in a grammar", depth, most_groups);
        refuse_more("rules in a grammar", n_rules, most_rules);
        refuse_more("elements in the repetitions of a grammar", n_elements, most_repetitions);
    }
}

void set_most_tokens(int32_t n_ctx) {
    most_tokens = n_ctx;
}

void check_texts(const llama_vocab * vocab, const std::vector<std::string> & texts) {
    const int64_t most     = most_tokens;
    size_t        n_bytes  = 0;
    int64_t       n_tokens = 0;
    for (const std::string & text : texts) {
        n_bytes += text.size();
    }
    if (n_bytes <= part_size || most <= 0) {
        return;
    }
    n_bytes = 0;
    for (const std::string & text : texts) {
        for (size_t begin = 0; begin < text.size();) {
            size_t end = std::min(text.size(), begin + part_size);
            while (end < text.size() && inside_character((unsigned char) text[end])) {
                ++end;
            }
            const int32_t size = (int32_t) (end - begin);
            n_tokens -= llama_tokenize(vocab, text.data() + begin, size, nullptr, 0, false, false);
            n_bytes += (size_t) size;
            begin = end;
            // a cut through a word makes a few tokens more of it
            if (n_tokens > most + most / 50 + 64) {
                throw std::invalid_argument("the prompt is longer than the context: found " + std::to_string(n_tokens) +
                                            " tokens in its first " + std::to_string(n_bytes) +
                                            " bytes, expected fewer than " + std::to_string(most));
            }
        }
    }
}

} // namespace draftwood
