// GGUF headers: see gguf_header.h.

#include "drafters/gguf_header.h"

#include "drafters/gguf_fields.h"
#include "llama/status.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>

namespace draftwood {

namespace {

int64_t size_of_gguf(const char * path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
        fail(DW_ERR_FILE, "%s cannot be opened for reading", path);
    }
    char magic[4] = {};
    file.read(magic, sizeof(magic));
    if (file.gcount() != sizeof(magic) || std::memcmp(magic, GGUF_MAGIC, sizeof(magic)) != 0) {
        char shown[32] = "";
        for (int i = 0; i < (int) file.gcount(); ++i) {
            std::snprintf(shown + 3 * i, 4, " %02x", (unsigned char) magic[i]);
        }
        fail(DW_ERR_FILE, "%s is not a GGUF file: it starts with bytes%s, expected 47 47 55 46 (\"GGUF\")", path,
             shown[0] ? shown : " (none)");
    }
    file.seekg(0, std::ios::end);
    return (int64_t) file.tellg();
}

// bytes that the header says the file must have
int64_t announced_size(const gguf_context * gguf) {
    size_t end = gguf_get_data_offset(gguf);
    for (int64_t i = 0; i < gguf_get_n_tensors(gguf); ++i) {
        end =
            std::max(end, gguf_get_data_offset(gguf) + gguf_get_tensor_offset(gguf, i) + gguf_get_tensor_size(gguf, i));
    }
    return (int64_t) end;
}

} // namespace

gguf_header::gguf_header(const char * path) :
    file_bytes_(size_of_gguf(path)),
    gguf_(gguf_init_from_file(path, { /*no_alloc*/ true, /*ctx*/ nullptr })) {
    if (!gguf_) {
        fail(DW_ERR_FILE,
             "%s has a damaged or cut-off header (%lld bytes on disk); expected a whole GGUF of version 2 or 3", path,
             (long long) file_bytes_);
    }
    const int64_t announced = announced_size(gguf_.get());
    if (file_bytes_ < announced) {
        fail(DW_ERR_FILE, "%s is cut off: found %lld bytes, its header expects %lld", path, (long long) file_bytes_,
             (long long) announced);
    }
    require_sound_fields(*this, path);
}

bool gguf_header::has_tensor(const std::string & name) const {
    return gguf_find_tensor(gguf_.get(), name.c_str()) >= 0;
}

int64_t gguf_header::find(const std::string & key, gguf_type type) const {
    const int64_t id = gguf_find_key(gguf_.get(), key.c_str());
    return id >= 0 && gguf_get_kv_type(gguf_.get(), id) == type ? id : -1;
}

uint32_t gguf_header::u32(const std::string & key) const {
    const int64_t id = find(key, GGUF_TYPE_UINT32);
    return id >= 0 ? gguf_get_val_u32(gguf_.get(), id) : 0;
}

bool gguf_header::f32(const std::string & key, float & value) const {
    const int64_t id = find(key, GGUF_TYPE_FLOAT32);
    value            = id >= 0 ? gguf_get_val_f32(gguf_.get(), id) : 0.0f;
    return id >= 0;
}

std::vector<std::pair<std::string, std::string>> gguf_header::scalar_texts() const {
    std::vector<std::pair<std::string, std::string>> found;
    for (int64_t i = 0; i < gguf_get_n_kv(gguf_.get()); ++i) {
        const bool is_text = gguf_get_kv_type(gguf_.get(), i) == GGUF_TYPE_STRING;
        found.emplace_back(gguf_get_key(gguf_.get(), i), is_text ? gguf_get_val_str(gguf_.get(), i) : "");
    }
    return found;
}

std::vector<std::pair<std::string, ggml_type>> gguf_header::tensors() const {
    std::vector<std::pair<std::string, ggml_type>> found;
    for (int64_t i = 0; i < n_tensors(); ++i) {
        found.emplace_back(gguf_get_tensor_name(gguf_.get(), i), gguf_get_tensor_type(gguf_.get(), i));
    }
    return found;
}

std::vector<std::pair<std::string, int64_t>> gguf_header::tensor_bytes() const {
    std::vector<std::pair<std::string, int64_t>> found;
    for (int64_t i = 0; i < n_tensors(); ++i) {
        found.emplace_back(gguf_get_tensor_name(gguf_.get(), i), (int64_t) gguf_get_tensor_size(gguf_.get(), i));
    }
    return found;
}

int64_t gguf_header::n_values(const std::string & tensor) const {
    const int64_t id = gguf_find_tensor(gguf_.get(), tensor.c_str());
    if (id < 0) {
        return 0;
    }
    const ggml_type type = gguf_get_tensor_type(gguf_.get(), id);
    return (int64_t) (gguf_get_tensor_size(gguf_.get(), id) / ggml_type_size(type)) * ggml_blck_size(type);
}

int64_t gguf_header::n_texts(const std::string & key) const {
    const int64_t id = find(key, GGUF_TYPE_ARRAY);
    return id >= 0 ? (int64_t) gguf_get_arr_n(gguf_.get(), id) : 0;
}

std::string gguf_header::text(const std::string & key) const {
    const int64_t id = find(key, GGUF_TYPE_STRING);
    return id >= 0 ? gguf_get_val_str(gguf_.get(), id) : "";
}

std::vector<int32_t> gguf_header::numbers(const std::string & key) const {
    const int64_t id = find(key, GGUF_TYPE_ARRAY);
    if (id < 0) {
        return {};
    }
    const gguf_type type = gguf_get_arr_type(gguf_.get(), id);
    if (type != GGUF_TYPE_INT32 && type != GGUF_TYPE_UINT32) {
        return {};
    }
    const auto * data = static_cast<const int32_t *>(gguf_get_arr_data(gguf_.get(), id));
    return { data, data + gguf_get_arr_n(gguf_.get(), id) };
}

std::vector<bool> gguf_header::flags(const std::string & key) const {
    const int64_t id = find(key, GGUF_TYPE_ARRAY);
    if (id < 0 || gguf_get_arr_type(gguf_.get(), id) != GGUF_TYPE_BOOL) {
        const std::vector<int32_t> all = numbers(key);
        return std::vector<bool>(all.begin(), all.end());
    }
    const auto * data = static_cast<const int8_t *>(gguf_get_arr_data(gguf_.get(), id));
    return std::vector<bool>(data, data + gguf_get_arr_n(gguf_.get(), id));
}

std::vector<std::string> gguf_header::texts(const std::string & key) const {
    const int64_t id = find(key, GGUF_TYPE_ARRAY);
    if (id < 0 || gguf_get_arr_type(gguf_.get(), id) != GGUF_TYPE_STRING) {
        return {};
    }
    std::vector<std::string> found(gguf_get_arr_n(gguf_.get(), id));
    for (size_t i = 0; i < found.size(); ++i) {
        found[i] = gguf_get_arr_str(gguf_.get(), id, i);
    }
    return found;
}

bool gguf_header::is_split() const {
    const int64_t id = find("split.count", GGUF_TYPE_UINT16);
    return id >= 0 && gguf_get_val_u16(gguf_.get(), id) > 1;
}

} // namespace draftwood
