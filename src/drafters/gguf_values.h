// Values of a GGUF's fields, and words for those that no model can have. Names are without the architecture.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace draftwood {

class gguf_header;

// Compared by address, not by text.
inline constexpr const char * key_length   = "attention.key_length";
inline constexpr const char * value_length = "attention.value_length";
inline constexpr const char * head_size    = "embedding_length / attention.head_count"; // in place of the two above

// A field that others are held to, and what to call it.
struct field_limit {
    uint32_t     value;
    const char * name;
};

// Header and path are the caller's. Test: tests/model/test_damaged_header.py.
class gguf_values {
  public:
    gguf_values(const gguf_header & header, const char * path);

    const gguf_header & header() const { return header_; }
    const char *        path() const { return path_; }
    const std::string & architecture() const { return architecture_; }

    std::string key(const std::string & name) const { return architecture_ + "." + name; }
    bool        is_absent(const char * name) const;

    // one, one for each layer, or none if it is absent or of another type
    std::vector<uint32_t> values(const char * name) const;
    uint32_t              most_of(const char * name) const; // 0: none
    field_limit           limit_of(const char * name) const;

    // throw failure with DW_ERR_FILE
    [[noreturn]] void refuse(const std::string & name, const std::string & value, const std::string & expected) const;
    [[noreturn]] void refuse(const std::string & name, uint32_t value, const std::string & expected) const;

    static std::string absent(const char * name) { return std::string(name) + " beside it, which is absent"; }

  private:
    const gguf_header & header_;
    const char *        path_;
    std::string         architecture_;
};

} // namespace draftwood
