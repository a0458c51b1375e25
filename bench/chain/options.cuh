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
    expert_types     of_experts;
    std::vector<int> rows;

    bool is_drafter() const { return kind == kind_of_layer::drafter; }
    // weights of layers exceed the card's L2
    int n_made() const { return n_layers > 0 ? n_layers : is_drafter() ? 8 : 40; }
};

// Ends the program if there are no random weights of the type.
inline ggml_type type_by_name(const std::string & name) {
    for (ggml_type each : types_of_weights) {
        std::string own = ggml_type_name(each);
        std::transform(own.begin(), own.end(), own.begin(), [](unsigned char sign) { return (char) tolower(sign); });
        if (name == own) {
            return each;
        }
    }
    fprintf(stderr, "%s is no type of weights here; expected q4_k, q6_k, q8_0, q3_k, iq3_xxs or iq3_s\n", name.c_str());
    exit(2);
}

inline ggml_type cache_by_name(const std::string & name) {
    if (name != "f16" && name != "q8_0") {
        fprintf(stderr, "--cache: %s is neither f16 nor q8_0\n", name.c_str());
        exit(2);
    }
    return name == "f16" ? GGML_TYPE_F16 : GGML_TYPE_Q8_0;
}

// ROUTED+SHARED, or one name for both
inline void set_down(expert_types & to, const std::string & names) {
    const size_t end = names.find('+');
    to.down          = type_by_name(names.substr(0, end));
    to.shared_down   = type_by_name(end == names.npos ? names : names.substr(end + 1));
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
            set_down(made.of_experts, value);
        } else if (name == "--experts") {
            made.of_experts.above = type_by_name(value);
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
