// Limits of what a request asks llama.cpp to parse: JSON in JSON, groups in groups, repetitions of repetitions, texts
// longer than a context. llama.cpp parses grammars and patterns recursively, and a deep one ends the process; tokens of
// 80 MB of text take gigabytes. As python/draftwood/load/grammars.py for `Llama`, but for depths: the server parses on
// threads with 8 MiB of stack. All throw std::invalid_argument, which llama-server makes a 400.
// Must not know: slots, requests. Test: tests/server/test_bad_input.py.

#pragma once

#include "llama.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

namespace draftwood {

constexpr int    most_json_depth  = 200;
constexpr size_t most_references  = 2000;      // of JSON schemas: each may lead to the next
constexpr int    most_groups      = 2000;      // in each other, of a grammar or a pattern
constexpr int    most_rules       = 20000;     // of a grammar: one may begin with the next
constexpr size_t most_grammar     = 4u << 20;  // bytes
constexpr size_t most_trigger     = 4096;      // bytes: std::regex recurses for each
constexpr size_t most_prompts     = 2048;      // of a request, documents of a rerank too: some 7 KB of memory each
constexpr size_t most_repetitions = 16u << 20; // elements that a grammar's repetitions come to, 8 bytes each

void check_grammar(const std::string & grammar);

// Tokens of a slot's context. Until it is called no text is refused.
void set_most_tokens(int32_t n_ctx);
void check_texts(const llama_vocab * vocab, const std::vector<std::string> & texts); // of one prompt

// A prompt as llama-server takes it: a text, an array that may have texts, an object with a text.
template <typename Json> void check_prompt(const llama_vocab * vocab, const Json & prompt) {
    std::vector<std::string> texts;
    if (prompt.is_string()) {
        texts.push_back(prompt.template get<std::string>());
    } else if (prompt.is_array()) {
        for (const auto & part : prompt) {
            if (part.is_string()) {
                texts.push_back(part.template get<std::string>());
            }
        }
    } else if (prompt.is_object() && prompt.contains("prompt_string")) {
        check_prompt(vocab, prompt.at("prompt_string"));
    }
    check_texts(vocab, texts);
}

// The others are inline, because llama.cpp's common library calls them.

inline void refuse_more(const char * what, size_t found, size_t most) {
    if (found > most) {
        throw std::invalid_argument("found " + std::to_string(found) + " " + what + "; expected at most " +
                                    std::to_string(most));
    }
}

inline void check_prompts(size_t n) {
    refuse_more("prompts or documents in a request", n, most_prompts);
}

// The end of what begins at `at` and ends with an unescaped `last`.
inline size_t past(const std::string & text, size_t at, char last) {
    for (++at; at < text.size() && text[at] != last; ++at) {
        at += text[at] == '\\' ? 1 : 0;
    }
    return std::min(text.size(), at + 1);
}

constexpr size_t longest_reference = 4 * 6 + 2; // all four letters escaped, and quotes

// Whether a string of JSON, quotes included, is "$ref", however its letters are escaped.
inline bool is_reference(const std::string & quoted) {
    std::string found;
    for (size_t at = 1; at + 1 < quoted.size() && found.size() <= 4; ++at) {
        if (quoted.compare(at, 2, "\\u") == 0) {
            found += (char) std::strtoul(quoted.substr(at + 2, 4).c_str(), nullptr, 16);
            at += 5;
        } else {
            found += quoted[at];
        }
    }
    return found == "$ref";
}

// JSON: a request's body, and the arguments of a call in it. What is no JSON is left to its parser.
inline void check_nesting(const std::string & json) {
    size_t depth = 0, n_references = 0;
    for (size_t at = 0; at < json.size();) {
        if (json[at] == '"') {
            const size_t begin = at;
            at                 = past(json, at, '"');
            const size_t n     = at - begin;
            n_references += n <= longest_reference && is_reference(json.substr(begin, n)) ? 1 : 0;
            refuse_more("references of JSON schemas", n_references, most_references);
            continue;
        }
        depth += json[at] == '[' || json[at] == '{' ? 1 : 0;
        depth -= (json[at] == ']' || json[at] == '}') && depth > 0 ? 1 : 0;
        refuse_more("objects and arrays in each other", depth, most_json_depth);
        ++at;
    }
}

// The regular expression of a JSON schema's "pattern".
inline void check_pattern(const std::string & pattern) {
    size_t depth = 0;
    for (const char c : pattern) {
        depth += c == '(' ? 1 : 0;
        depth -= c == ')' && depth > 0 ? 1 : 0;
        refuse_more("groups in each other in a pattern", depth, most_groups / 2);
    }
}

// A word or a regular expression that a lazy grammar waits for.
inline void check_trigger(const std::string & trigger) {
    refuse_more("bytes of a grammar's trigger", trigger.size(), most_trigger);
}

} // namespace draftwood
