// What the names of experts' tensors say: "blk.N.ffn_.._exps.weight".
// Test: tests/model/test_expert_pool_models.py.

#pragma once

#include "ggml.h"

#include <cstdint>
#include <cstdio>
#include <string_view>

namespace draftwood {

inline bool names_experts(const ggml_tensor * tensor) {
    constexpr std::string_view ending = "_exps.weight";
    const std::string_view     name   = tensor->name;
    return name.size() > ending.size() && name.substr(name.size() - ending.size()) == ending;
}

// -1: the name says none
inline int32_t layer_named(const ggml_tensor * tensor) {
    int32_t il = -1;
    return std::sscanf(tensor->name, "blk.%d.", &il) == 1 ? il : -1;
}

} // namespace draftwood
