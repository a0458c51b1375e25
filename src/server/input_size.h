// Limits of what a request asks llama.cpp to parse: JSON in JSON, groups in groups, repetitions of repetitions, texts
// longer than a context. llama.cpp parses grammars and patterns recursively, and a deep one ends the process; tokens of
// 80 MB of text take gigabytes. As python/draftwood/load/grammars.py for `Llama`, but for depths: the server parses on
// threads with 8 MiB of stack. All throw std::invalid_argument, which llama-server makes a 400.
// Must not know: slots, requests. Test: tests/server/test_bad_input.py.

#pragma once

#include "llama.h"

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace draftwood {

constexpr int    most_json_depth  = 200;
constexpr int    most_groups      = 2000;      // in each other, of a grammar or a pattern
constexpr int    most_rules       = 20000;     // of a grammar: one may begin with the next
constexpr size_t most_grammar     = 4u << 20;  // bytes
constexpr size_t most_repetitions = 16u << 20; // elements that a grammar's repetitions come to, 8 bytes each

// The body of a request. What is no JSON is left to its parser.
void check_body(const std::string & body);

void check_grammar(const std::string & grammar);

// Tokens of a slot's context. Until it is called no text is refused.
void set_most_tokens(int32_t n_ctx);
void check_text(const llama_vocab * vocab, const std::string & text);

// A prompt as llama-server takes it: a text, an array that may have texts, an object with a text.
template <typename Json> void check_prompt(const llama_vocab * vocab, const Json & prompt) {
    if (prompt.is_string()) {
        check_text(vocab, prompt.template get<std::string>());
    } else if (prompt.is_array()) {
        for (const auto & part : prompt) {
            if (part.is_string()) {
                check_text(vocab, part.template get<std::string>());
            }
        }
    } else if (prompt.is_object() && prompt.contains("prompt_string")) {
        check_prompt(vocab, prompt.at("prompt_string"));
    }
}

inline void refuse_more(const char * what, size_t found, size_t most) {
    if (found > most) {
        throw std::invalid_argument("found " + std::to_string(found) + " " + what + "; expected at most " +
                                    std::to_string(most));
    }
}

// The regular expression of a JSON schema's "pattern". Here, because llama.cpp's common library calls it.
inline void check_pattern(const std::string & pattern) {
    size_t depth = 0;
    for (const char c : pattern) {
        depth += c == '(' ? 1 : 0;
        depth -= c == ')' && depth > 0 ? 1 : 0;
        refuse_more("groups in each other in a pattern", depth, most_groups / 2);
    }
}

} // namespace draftwood
