// The pool of experts that llama-server was asked for. llama.cpp's common_params hold it, so that it travels with the
// other arguments. Must not know: llama.cpp, the pool. Test: tests/server/test_pool.py.

#pragma once

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <regex>
#include <stdexcept>
#include <string>

struct dw_pool_spec {
    int64_t     n_bytes = -1;    // of --expert-vram; -1: no pool
    std::string heat_file;       // of --expert-heat
    int32_t     guess   = -1;    // of --expert-guess and --no-expert-guess; -1: on a card
    bool        is_made = false; // the overrides of common_params are the pool's
    int64_t     n_taken = 0;     // bytes of the card that experts take then

    // Takes a size as python/draftwood/load/experts.py does. Throws std::invalid_argument.
    void take(const std::string & size) {
        static const std::regex form("\\s*(\\d{1,18}(\\.\\d*)?)\\s*([a-zA-Z]*)\\s*");
        std::smatch             parts;
        const bool              is_one = std::regex_match(size, parts, form);
        const double            unit   = is_one ? unit_named(parts[3]) : 0;
        if (unit == 0) {
            throw std::invalid_argument("--expert-vram: found '" + size +
                                        "', expected a number of bytes, or text such as '6GiB'");
        }
        n_bytes = (int64_t) std::min(std::stod(parts[1]) * unit, 9e18);
    }

    // bytes; 0: there is no such unit
    static double unit_named(std::string name) {
        std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return (char) std::toupper(c); });
        static const char * const names[] = { "", "B", "KB", "MB", "GB", "KIB", "MIB", "GIB" };
        static const double       units[] = { 1, 1, 1e3, 1e6, 1e9, 1024.0, 1048576.0, 1073741824.0 };
        const auto                found   = std::find(std::begin(names), std::end(names), name);
        return found == std::end(names) ? 0 : units[found - std::begin(names)];
    }
};
