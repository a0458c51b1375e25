// GGUF headers: see gguf_header.h.

#include "drafters/gguf_header.h"

#include "drafters/gguf_fields.h"
#include "llama.h"
#include "llama/status.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <numeric>
#include <set>

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

// -1: absent or of another type
int u16_of(const gguf_context * gguf, const char * key) {
    const int64_t id = gguf_find_key(gguf, key);
    return id >= 0 && gguf_get_kv_type(gguf, id) == GGUF_TYPE_UINT16 ? gguf_get_val_u16(gguf, id) : -1;
}

} // namespace

gguf_header::gguf_file::gguf_file(const char * path) :
    n_bytes(size_of_gguf(path)),
    gguf(gguf_init_from_file(path, { /*no_alloc*/ true, /*ctx*/ nullptr })) {
    if (!gguf) {
        fail(DW_ERR_FILE,
             "%s has a damaged or cut-off header (%lld bytes on disk); expected a whole GGUF of version 2 or 3", path,
             (long long) n_bytes);
    }
    const int64_t announced = announced_size(gguf.get());
    if (n_bytes < announced) {
        fail(DW_ERR_FILE, "%s is cut off: found %lld bytes, its header expects %lld", path, (long long) n_bytes,
             (long long) announced);
    }
}

gguf_header::gguf_header(const char * path) {
    files_.emplace_back(path);
    open_others(path);
    require_sound_fields(*this, path);
}

// As llama.cpp's loader finds and checks them.
void gguf_header::open_others(const char * path) {
    const int n = u16_of(fields(), "split.count"), number = u16_of(fields(), "split.no");
    if (n <= 1) {
        return;
    }
    if (number < 0) {
        fail(DW_ERR_FILE, "%s is one of %d files of a model, and has no split.no of 16 bits; expected its number", path,
             n);
    }
    std::vector<char> name(std::strlen(path) + 32);
    if (llama_split_prefix(name.data(), name.size(), path, number, n) <= 0) {
        fail(DW_ERR_FILE, "%s is file %d of %d of a model; expected a name that ends in -%05d-of-%05d.gguf", path,
             number + 1, n, number + 1, n);
    }
    const std::string prefix  = name.data();
    const auto        path_of = [&](int i) {
        llama_split_path(name.data(), name.size(), prefix.c_str(), i, n);
        return name.data();
    };
    if (number != 0) {
        fail(DW_ERR_FILE, "%s is file %d of %d of a model; expected the first one, %s", path, number + 1, n,
             path_of(0));
    }
    for (int i = 1; i < n; ++i) {
        open_other(path_of(i), i, n);
    }
    require_all_tensors(path);
}

void gguf_header::open_other(const char * path, int number, int n) {
    if (!std::ifstream(path)) {
        fail(DW_ERR_FILE, "%s cannot be opened for reading; expected file %d of %d of the model beside the first one",
             path, number + 1, n);
    }
    const gguf_context * other = files_.emplace_back(path).gguf.get();
    const int            found = u16_of(other, "split.no"), of = u16_of(other, "split.count");
    if (found < 0 || of < 0) {
        fail(DW_ERR_FILE, "%s has no split.no and split.count of 16 bits; expected file %d of %d of the model", path,
             number + 1, n);
    }
    if (found != number || of != n) {
        fail(DW_ERR_FILE, "%s says that it is file %d of %d of a model; expected file %d of %d", path, found + 1, of,
             number + 1, n);
    }
}

void gguf_header::require_all_tensors(const char * path) const {
    std::set<std::string> names;
    for (const auto & [name, type] : tensors()) {
        if (!names.insert(name).second) {
            fail(DW_ERR_FILE, "two of the %d files of %s have a tensor %s; expected it once", (int) files_.size(), path,
                 name.c_str());
        }
    }
    const int64_t id     = find("split.tensors.count", GGUF_TYPE_INT32);
    const int64_t wanted = id >= 0 ? gguf_get_val_i32(fields(), id) : -1;
    if (wanted < 0) {
        fail(DW_ERR_FILE, "%s has no split.tensors.count of 32 bits; expected the number of its tensors", path);
    }
    if ((int64_t) names.size() != wanted) {
        fail(DW_ERR_FILE, "the %d files of %s have %zu tensors; expected %lld, as the first one says",
             (int) files_.size(), path, names.size(), (long long) wanted);
    }
}

int64_t gguf_header::file_bytes() const {
    return std::accumulate(files_.begin(), files_.end(), int64_t{ 0 },
                           [](int64_t sum, const gguf_file & each) { return sum + each.n_bytes; });
}

int64_t gguf_header::n_tensors() const {
    int64_t n = 0;
    for_each_tensor([&](const gguf_context *, int64_t) { ++n; });
    return n;
}

template <typename F> void gguf_header::for_each_tensor(F && use) const {
    for (const gguf_file & file : files_) {
        const int64_t n = gguf_get_n_tensors(file.gguf.get());
        for (int64_t i = 0; i < n; ++i) {
            use(file.gguf.get(), i);
        }
    }
}

bool gguf_header::has_tensor(const std::string & name) const {
    return std::any_of(files_.begin(), files_.end(),
                       [&](const gguf_file & file) { return gguf_find_tensor(file.gguf.get(), name.c_str()) >= 0; });
}

int64_t gguf_header::find(const std::string & key, gguf_type type) const {
    const int64_t id = gguf_find_key(fields(), key.c_str());
    return id >= 0 && gguf_get_kv_type(fields(), id) == type ? id : -1;
}

uint32_t gguf_header::u32(const std::string & key) const {
    const int64_t id = find(key, GGUF_TYPE_UINT32);
    return id >= 0 ? gguf_get_val_u32(fields(), id) : 0;
}

bool gguf_header::f32(const std::string & key, float & value) const {
    const int64_t id = find(key, GGUF_TYPE_FLOAT32);
    value            = id >= 0 ? gguf_get_val_f32(fields(), id) : 0.0f;
    return id >= 0;
}

std::vector<std::pair<std::string, std::string>> gguf_header::scalar_texts() const {
    std::vector<std::pair<std::string, std::string>> found;
    for (int64_t i = 0; i < gguf_get_n_kv(fields()); ++i) {
        const bool is_text = gguf_get_kv_type(fields(), i) == GGUF_TYPE_STRING;
        found.emplace_back(gguf_get_key(fields(), i), is_text ? gguf_get_val_str(fields(), i) : "");
    }
    return found;
}

std::vector<std::pair<std::string, ggml_type>> gguf_header::tensors() const {
    std::vector<std::pair<std::string, ggml_type>> found;
    for_each_tensor([&](const gguf_context * file, int64_t i) {
        found.emplace_back(gguf_get_tensor_name(file, i), gguf_get_tensor_type(file, i));
    });
    return found;
}

std::vector<std::pair<std::string, int64_t>> gguf_header::tensor_bytes() const {
    std::vector<std::pair<std::string, int64_t>> found;
    for_each_tensor([&](const gguf_context * file, int64_t i) {
        found.emplace_back(gguf_get_tensor_name(file, i), (int64_t) gguf_get_tensor_size(file, i));
    });
    return found;
}

int64_t gguf_header::n_values(const std::string & tensor) const {
    for (const gguf_file & file : files_) {
        const int64_t id = gguf_find_tensor(file.gguf.get(), tensor.c_str());
        if (id >= 0) {
            const ggml_type type = gguf_get_tensor_type(file.gguf.get(), id);
            return (int64_t) (gguf_get_tensor_size(file.gguf.get(), id) / ggml_type_size(type)) * ggml_blck_size(type);
        }
    }
    return 0;
}

int64_t gguf_header::n_texts(const std::string & key) const {
    const int64_t id = find(key, GGUF_TYPE_ARRAY);
    return id >= 0 ? (int64_t) gguf_get_arr_n(fields(), id) : 0;
}

std::string gguf_header::text(const std::string & key) const {
    const int64_t id = find(key, GGUF_TYPE_STRING);
    return id >= 0 ? gguf_get_val_str(fields(), id) : "";
}

std::vector<int32_t> gguf_header::numbers(const std::string & key) const {
    const int64_t id = find(key, GGUF_TYPE_ARRAY);
    if (id < 0) {
        return {};
    }
    const gguf_type type = gguf_get_arr_type(fields(), id);
    if (type != GGUF_TYPE_INT32 && type != GGUF_TYPE_UINT32) {
        return {};
    }
    const auto * data = static_cast<const int32_t *>(gguf_get_arr_data(fields(), id));
    return { data, data + gguf_get_arr_n(fields(), id) };
}

std::vector<bool> gguf_header::flags(const std::string & key) const {
    const int64_t id = find(key, GGUF_TYPE_ARRAY);
    if (id < 0 || gguf_get_arr_type(fields(), id) != GGUF_TYPE_BOOL) {
        const std::vector<int32_t> all = numbers(key);
        return std::vector<bool>(all.begin(), all.end());
    }
    const auto * data = static_cast<const int8_t *>(gguf_get_arr_data(fields(), id));
    return std::vector<bool>(data, data + gguf_get_arr_n(fields(), id));
}

std::vector<std::string> gguf_header::texts(const std::string & key) const {
    const int64_t id = find(key, GGUF_TYPE_ARRAY);
    if (id < 0 || gguf_get_arr_type(fields(), id) != GGUF_TYPE_STRING) {
        return {};
    }
    std::vector<std::string> found(gguf_get_arr_n(fields(), id));
    for (size_t i = 0; i < found.size(); ++i) {
        found[i] = gguf_get_arr_str(fields(), id, i);
    }
    return found;
}

} // namespace draftwood
