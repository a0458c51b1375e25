// See gguf_tensors.h.

#include "drafters/gguf_tensors.h"

#include "drafters/gguf_header.h"
#include "ggml.h"
#include "llama/status.h"

#include <algorithm>
#include <string_view>

namespace draftwood {

namespace {

// types that no weight has: llama.cpp loads them, and a product with them ends the process
const ggml_type no_weights[] = { GGML_TYPE_Q8_1, GGML_TYPE_Q8_K, GGML_TYPE_I8, GGML_TYPE_I16,
                                 GGML_TYPE_I32,  GGML_TYPE_I64,  GGML_TYPE_F64 };
// ends of names of tensors that ggml's CPU backend takes as f32 only
const char * const f32_only[] = { "norm.weight", ".bias", ".ssm_a", ".ssm_conv1d.weight" };

bool ends_with(std::string_view text, std::string_view end) {
    return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

} // namespace

void require_sound_tensors(const gguf_header & header, const char * path) {
    for (const auto & [name, type] : header.tensors()) {
        const bool only_f32 = std::any_of(std::begin(f32_only), std::end(f32_only),
                                          [&name = name](const char * end) { return ends_with(name, end); });
        const bool refused  = std::find(std::begin(no_weights), std::end(no_weights), type) != std::end(no_weights);
        if (refused || (only_f32 && type != GGML_TYPE_F32)) {
            fail(DW_ERR_FILE, "%s: the tensor %s is of type %s; expected %s", path, name.c_str(), ggml_type_name(type),
                 only_f32 ? "f32" : "a type of weights");
        }
    }
}

} // namespace draftwood
