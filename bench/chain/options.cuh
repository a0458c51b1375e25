// What the command line of the benchmark says: chain.cu.

#pragma once

#include "chain/attention.cuh"
#include "chain/layers.cuh"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace chain {

constexpr int most = 16; // rows

enum class kind_of_layer { delta_net, attention, drafter };

struct options {
    bool             is_check = false;
    kind_of_layer    kind     = kind_of_layer::delta_net;
    int              n_layers = 0; // 0: n_made() says
    cells_of_cache   cells{};      // unless layers are delta nets
    types_of_down    of_down;
    std::vector<int> rows;

    bool is_drafter() const { return kind == kind_of_layer::drafter; }
    // weights of layers exceed the card's L2
    int n_made() const { return n_layers > 0 ? n_layers : is_drafter() ? 8 : 40; }
};

// Ends the program if it is neither of the types that files of Q4_K_M have.
inline ggml_type type_by_name(const std::string & name) {
    if (name != "q4_k" && name != "q6_k") {
        fprintf(stderr, "--down: %s is neither q4_k nor q6_k\n", name.c_str());
        exit(2);
    }
    return name == "q4_k" ? GGML_TYPE_Q4_K : GGML_TYPE_Q6_K;
}

inline ggml_type cache_by_name(const std::string & name) {
    if (name != "f16" && name != "q8_0") {
        fprintf(stderr, "--cache: %s is neither f16 nor q8_0\n", name.c_str());
        exit(2);
    }
    return name == "f16" ? GGML_TYPE_F16 : GGML_TYPE_Q8_0;
}

// From ROUTED+SHARED, or one name for both.
inline types_of_down types_by_names(const std::string & names) {
    const size_t end = names.find('+');
    return { type_by_name(names.substr(0, end)), type_by_name(end == names.npos ? names : names.substr(end + 1)) };
}

// From SEEN or SEEN+UNSEEN.
inline cells_of_cache cells_by_text(const std::string & text) {
    const size_t end = text.find('+');
    const int    n   = end == text.npos ? 0 : std::max(0, atoi(text.c_str() + end + 1));
    return { std::max(most, atoi(text.c_str())), n, GGML_TYPE_F16 };
}

inline options options_of(const std::vector<std::string> & arguments) {
    options   made;
    ggml_type cache = GGML_TYPE_F16;
    for (const std::string & argument : arguments) {
        const size_t      end   = argument.find('=');
        const std::string name  = argument.substr(0, end);
        const std::string value = end == argument.npos ? "" : argument.substr(end + 1);
        if (name == "--check") {
            made.is_check = true;
        } else if (name == "--layers") {
            made.n_layers = std::max(1, atoi(value.c_str()));
        } else if (name == "--down") {
            made.of_down = types_by_names(value);
        } else if (name == "--cache") {
            cache = cache_by_name(value);
        } else if (name == "--attention" || name == "--drafter") {
            made.kind  = name == "--drafter" ? kind_of_layer::drafter : kind_of_layer::attention;
            made.cells = cells_by_text(value);
        } else {
            made.rows.push_back(std::clamp(atoi(argument.c_str()), 1, most));
        }
    }
    made.cells.type = cache;
    if (made.rows.empty()) {
        made.rows = { 1, 2, 6, 16 };
    }
    return made;
}

} // namespace chain
