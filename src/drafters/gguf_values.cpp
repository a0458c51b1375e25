// See gguf_values.h.

#include "drafters/gguf_values.h"

#include "drafters/gguf_header.h"
#include "llama/status.h"

#include <algorithm>

namespace draftwood {

gguf_values::gguf_values(const gguf_header & header, const char * path) :
    header_(header),
    path_(path),
    architecture_(header.architecture()) {}

bool gguf_values::is_absent(const char * name) const {
    return !header_.has_key(key(name));
}

std::vector<uint32_t> gguf_values::values(const char * name) const {
    if (header_.has_u32(key(name))) {
        return { header_.u32(key(name)) };
    }
    const std::vector<int32_t> numbers = header_.numbers(key(name));
    return { numbers.begin(), numbers.end() };
}

uint32_t gguf_values::most_of(const char * name) const {
    const std::vector<uint32_t> all = values(name);
    return all.empty() ? 0 : *std::max_element(all.begin(), all.end());
}

// llama.cpp computes the size of heads where the file does not give it
field_limit gguf_values::limit_of(const char * name) const {
    if ((name != key_length && name != value_length) || !is_absent(name)) {
        return { most_of(name), name };
    }
    const std::vector<uint32_t> heads = values("attention.head_count");
    if (heads.empty() || heads[0] == 0) {
        return { 0, name };
    }
    return { most_of("embedding_length") / heads[0], head_size };
}

void gguf_values::refuse(const std::string & name, const std::string & value, const std::string & expected) const {
    fail(DW_ERR_FILE, "%s: %s is %s; expected %s", path_, key(name).c_str(), value.c_str(), expected.c_str());
}

void gguf_values::refuse(const std::string & name, uint32_t value, const std::string & expected) const {
    refuse(name, std::to_string(value), expected);
}

} // namespace draftwood
