// See gguf_attention.h.
//
// Source: load_hparams of llama-model.cpp, load_arch_hparams of models/qwen35.cpp, qwen35moe.cpp and dflash.cpp, and
// create_memory of llama-model.cpp at the pin.

#include "drafters/gguf_attention.h"

#include "drafters/gguf_header.h"
#include "drafters/gguf_values.h"

#include <algorithm>
#include <string>
#include <vector>

namespace draftwood {

namespace {

// keys and values are of one size
void check_heads(const gguf_values & file) {
    const field_limit keys = file.limit_of(key_length), vals = file.limit_of(value_length);
    for (const field_limit & size : { keys, vals }) {
        if (size.name == head_size && (size.value < 2 || size.value % 2 != 0)) {
            file.refuse(head_size, size.value, "a multiple of 2, as the file gives no size of heads");
        }
    }
    if (keys.value != vals.value) {
        const bool          is_given = vals.name != head_size && vals.value != 0;
        const field_limit & found    = is_given ? vals : keys;
        const field_limit & other    = is_given ? keys : vals;
        file.refuse(found.name, found.value,
                    other.value == 0 ? file.absent(other.name) : std::to_string(other.value) + ", " + other.name);
    }
}

// the graphs take one layer's number for all
void check_heads_of_layers(const gguf_values & file) {
    const char * const          name = "attention.head_count_kv";
    const std::vector<uint32_t> all  = file.values(name);
    if (all.empty() && !file.is_absent(name)) { // llama.cpp takes booleans for numbers
        file.refuse(name, "of another type", "a whole number, or one for each layer");
    }
    const uint32_t one = file.most_of(name);
    for (size_t il = 0; il < all.size(); ++il) {
        // layers without attention have no norm of queries
        const bool may_be_0 = file.architecture() != "dflash" &&
                              !file.header().has_tensor("blk." + std::to_string(il) + ".attn_q_norm.weight");
        if (all[il] != one && !(all[il] == 0 && may_be_0)) {
            file.refuse(name, std::to_string(all[il]) + " for layer " + std::to_string(il),
                        "one number for all layers, such as " + std::to_string(one));
        }
    }
}

// pairs of values that each of the four positions rotates; a drafter may have none
void check_rope_sections(const gguf_values & file) {
    const char * const         name  = "rope.dimension_sections";
    const std::vector<int32_t> pairs = file.header().numbers(file.key(name));
    if (file.is_absent(name)) {
        return;
    }
    if (pairs.size() != 4) {
        file.refuse(name, "no array of 4 whole numbers", "one");
    }
    const uint32_t n_rot = file.most_of("rope.dimension_count");
    const int64_t  most  = ((int64_t) (n_rot ? n_rot : file.limit_of(key_length).value) + 1) / 2;
    const int64_t  first = (int64_t) pairs[0] + pairs[1] + pairs[2];
    const bool     sound = *std::min_element(pairs.begin(), pairs.end()) >= 0;
    const bool     empty = first == 0 && (pairs[3] != 0 || file.architecture() != "dflash");
    if (!sound || empty || first + pairs[3] > most) {
        std::string shown;
        for (const int32_t n : pairs) {
            shown += (shown.empty() ? "" : ", ") + std::to_string(n);
        }
        file.refuse(name, "[" + shown + "]",
                    "none below 0, one of the first three above 0, together at most " + std::to_string(most) +
                        " pairs (rope.dimension_count)");
    }
}

// a window, and the layers that have it: llama.cpp makes a cache for these, and asserts that there are some
void check_window(const gguf_values & file) {
    const char * const      name = "attention.sliding_window_pattern";
    const std::vector<bool> has  = file.header().flags(file.key(name));
    const size_t            n    = std::min<size_t>(has.size(), file.most_of("block_count"));
    if (file.most_of("attention.sliding_window") > 0 && !file.is_absent(name) &&
        std::find(has.begin(), has.begin() + n, true) == has.begin() + n) {
        file.refuse(name, "true for no layer", "an array that is true for one of them, or no attention.sliding_window");
    }
}

} // namespace

void require_sound_attention(const gguf_values & file) {
    check_heads(file);
    check_heads_of_layers(file);
    check_rope_sections(file);
    if (file.architecture() == "dflash") {
        check_window(file);
    }
}

} // namespace draftwood
