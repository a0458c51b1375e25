// See heat_file.h.

#include "server/heat_file.h"

#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>

namespace draftwood {

namespace {

using nlohmann::json;

constexpr int32_t schema = 1;

// Throws whatever json does for another form.
expert_heat parse(std::istream & text) {
    const json found = json::parse(text);
    if (found.at("schema").get<int32_t>() != schema) {
        throw std::invalid_argument("schema");
    }
    expert_heat heat;
    for (const auto & [layer, values] : found.at("heat").items()) {
        size_t        n_read = 0;
        const int32_t il     = std::stoi(layer, &n_read);
        auto &        of     = heat[n_read == layer.size() ? il : -1];
        for (const json & value : values) {
            const bool fits = value.is_number_unsigned() && value.get<uint64_t>() <= UINT32_MAX;
            of.push_back(fits ? value.get<uint32_t>() : throw std::invalid_argument("value"));
        }
    }
    return heat;
}

} // namespace

std::optional<expert_heat> read_heat(const std::string & path, int32_t n_layers, int32_t n_experts) {
    try {
        std::ifstream file(path, std::ios::binary);
        expert_heat   heat = parse(file);
        for (const auto & [il, values] : heat) {
            if (il < 0 || il >= n_layers || (int32_t) values.size() != n_experts) {
                return std::nullopt;
            }
        }
        return heat;
    } catch (const std::exception &) {
        return std::nullopt;
    }
}

// A file is made to find out: rights alone do not tell.
std::string refusal_of_heat_file(const std::string & path) {
    namespace fs = std::filesystem;
    std::error_code ignored;
    const fs::path  folder = fs::path(path).has_parent_path() ? fs::path(path).parent_path() : fs::path(".");
    if (fs::is_directory(path, ignored)) {
        return "is a folder";
    }
    if (!fs::is_directory(folder, ignored)) {
        return "is in " + folder.string() + ", which is no folder";
    }
    const std::string new_path = path + ".new";
    const bool        opens    = std::ofstream(new_path, std::ios::binary).is_open();
    std::remove(new_path.c_str());
    return opens ? "" : "is in " + folder.string() + ", which cannot be written";
}

bool write_heat(const std::string & path, const expert_heat & heat, int32_t n_experts) {
    json layers = json::object();
    for (const auto & [il, values] : heat) {
        layers[std::to_string(il)] = values;
    }
    const std::string new_path = path + ".new";
    std::ofstream     file(new_path, std::ios::binary);
    file << json{ { "schema", schema }, { "n_experts", n_experts }, { "heat", layers } };
    file.close();
    std::error_code failed;
    if (file.good()) {
        std::filesystem::rename(new_path, path, failed);
    }
    return file.good() && !failed;
}

} // namespace draftwood
