// The header of a GGUF: read without its tensors, from a file that is as long as the header says. Of a model in several
// files the first one has the fields, and all of them have tensors.

#pragma once

#include "gguf.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace draftwood {

// Values that are absent or of another type are 0, "" or empty. Test: tests/model/test_bad_input.py.
class gguf_header {
  public:
    // path: of the first file; the others lie beside it, named as llama_split_path does. Throws failure with
    // DW_ERR_FILE: missing, no GGUF, damaged, cut off, fields that no model has (gguf_fields.h), not the first file
    explicit gguf_header(const char * path);

    int64_t n_files() const { return (int64_t) files_.size(); }
    int64_t file_bytes() const; // of all files
    int64_t n_tensors() const;

    bool                 has_key(const std::string & key) const { return gguf_find_key(fields(), key.c_str()) >= 0; }
    bool                 has_tensor(const std::string & name) const;
    bool                 has_u32(const std::string & key) const { return find(key, GGUF_TYPE_UINT32) >= 0; }
    bool                 has_text(const std::string & key) const { return find(key, GGUF_TYPE_STRING) >= 0; }
    uint32_t             u32(const std::string & key) const;
    bool                 f32(const std::string & key, float & value) const; // false: absent or of another type
    std::string          text(const std::string & key) const;
    std::string          architecture() const { return text("general.architecture"); }
    std::vector<int32_t> numbers(const std::string & key) const; // an array of i32 or u32
    std::vector<bool>    flags(const std::string & key) const;   // of booleans, or of numbers that are 0 or not
    std::vector<std::string> texts(const std::string & key) const;

    // every key, with the value of those that are a text
    std::vector<std::pair<std::string, std::string>> scalar_texts() const;

    std::vector<std::pair<std::string, ggml_type>> tensors() const;
    std::vector<std::pair<std::string, int64_t>>   tensor_bytes() const;
    int64_t n_values(const std::string & tensor) const; // 0: there is none of this name
    int64_t n_texts(const std::string & key) const;     // of an array

  private:
    struct free_gguf {
        void operator()(gguf_context * gguf) const { gguf_free(gguf); }
    };

    struct gguf_file {
        int64_t                                  n_bytes;
        std::unique_ptr<gguf_context, free_gguf> gguf;

        explicit gguf_file(const char * path);
    };

    const gguf_context * fields() const { return files_.front().gguf.get(); }

    // the key's number if its value has this type; -1: no
    int64_t find(const std::string & key, gguf_type type) const;

    void open_others(const char * path);
    void open_other(const char * path, int number, int n); // of n files; the first one has number 0
    void require_all_tensors(const char * path) const;

    // use(file, number of a tensor in it)
    template <typename F> void for_each_tensor(F && use) const;

    std::vector<gguf_file> files_;
};

} // namespace draftwood
