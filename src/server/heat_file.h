// Which experts were used most, in a file from one run to the next: python/draftwood/load/heat.py in C++.
// Must not know: the pool, llama-server. Test: tests/server/test_pool.py.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace draftwood {

using expert_heat = std::map<int32_t, std::vector<uint32_t>>; // u32[n_experts] by layer

// What the file holds; nothing: it is no heat file of a model with so many layers of so many experts.
std::optional<expert_heat> read_heat(const std::string & path, int32_t n_layers, int32_t n_experts);

// Why no heat file can be written to `path`; "" if one can.
std::string refusal_of_heat_file(const std::string & path);

// Puts a new file in the place of an old one. Returns false, and leaves the old one, if it cannot.
bool write_heat(const std::string & path, const expert_heat & heat, int32_t n_experts);

} // namespace draftwood
