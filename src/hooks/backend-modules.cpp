// Finds backend modules: see backend-modules.h.

#include "hooks/backend-modules.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <string>

#include "ggml-backend-dl.h" // needs <memory>; brings the namespace fs

namespace {

#ifdef _WIN32
constexpr char prefix[] = "draftwood-ggml-";
constexpr char suffix[] = ".dll";
#else
constexpr char prefix[] = "libdraftwood-ggml-";
constexpr char suffix[] = ".so"; // on macOS, too: they are modules
#endif

struct cpu_variant {
    std::string name;
    fs::path    path;
    int         score; // 0: it uses instructions that this CPU lacks
};

struct modules {
    std::vector<fs::path>    others;
    std::vector<cpu_variant> cpu; // best first
};

fs::path own_folder() {
#ifdef _WIN32
    HMODULE        own   = nullptr;
    constexpr auto flags = GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT;
    wchar_t        file[32768]; // the longest path of Windows
    if (!GetModuleHandleExW(flags, (LPCWSTR) &dw_cpu_variants, &own) || GetModuleFileNameW(own, file, 32768) == 0) {
        return {};
    }
    return fs::path(file).parent_path();
#else
    Dl_info info{};
    if (dladdr((const void *) &dw_cpu_variants, &info) == 0 || info.dli_fname == nullptr) {
        return {};
    }
    return fs::path(info.dli_fname).parent_path();
#endif
}

// ggml's score does not ask whether the operating system saves wide registers; the compiler's check does.
bool registers_are_saved(const std::string & variant) {
#if defined(__x86_64__) && defined(__GNUC__)
    const auto any = [&](std::initializer_list<const char *> names) {
        return std::any_of(names.begin(), names.end(), [&](const char * name) { return variant == name; });
    };
    if (any({ "skylakex", "icelake", "zen4" })) {
        return __builtin_cpu_supports("avx512f");
    }
    if (any({ "haswell", "alderlake" })) {
        return __builtin_cpu_supports("avx2");
    }
#endif
    (void) variant;
    return true;
}

// The score function is compiled without the module's instructions. Returns -1 if the module cannot be loaded.
int score_of(const fs::path & path, const std::string & variant) {
    const dl_handle_ptr handle{ dl_load_library(path) };
    if (handle == nullptr) {
        GGML_LOG_ERROR("draftwood: %s cannot be loaded: %s\n", path.filename().string().c_str(), dl_error());
        return -1;
    }
    const auto score = (int (*)()) dl_get_sym(handle.get(), "ggml_backend_score");
    const int  found = score == nullptr ? 1 : score();
    return registers_are_saved(variant) ? found : 0;
}

// Returns nullptr if the file fails to load or has another API version.
ggml_backend_reg_t load(const fs::path & path) {
    dl_handle * handle = dl_load_library(path); // for the life of the process
    if (handle == nullptr) {
        GGML_LOG_ERROR("draftwood: the backend %s cannot be loaded: %s\n", path.filename().string().c_str(),
                       dl_error());
        return nullptr;
    }
    const auto               init = (ggml_backend_init_t) dl_get_sym(handle, "ggml_backend_init");
    const ggml_backend_reg_t reg  = init == nullptr ? nullptr : init();
    if (reg == nullptr || reg->api_version != GGML_BACKEND_API_VERSION) {
        GGML_LOG_ERROR("draftwood: %s is no backend of this build\n", path.string().c_str());
        return nullptr;
    }
    return reg;
}

// "haswell" of "cpu-haswell"; empty if `name` is no CPU module
std::string variant_name(const std::string & name) {
    if (name == "cpu") {
        return "native";
    }
    return name.rfind("cpu-", 0) == 0 ? name.substr(4) : "";
}

modules find_modules() {
    modules         found;
    std::error_code error;
    for (const auto & entry : fs::directory_iterator(own_folder(), error)) {
        const std::string file = entry.path().filename().string();
        if (file.rfind(prefix, 0) != 0 || entry.path().extension() != suffix) {
            continue;
        }
        const std::string name    = entry.path().stem().string().substr(sizeof(prefix) - 1);
        const std::string variant = variant_name(name);
        if (!variant.empty()) {
            const int score = score_of(entry.path(), variant);
            if (score >= 0) {
                found.cpu.push_back({ variant, entry.path(), score });
            }
        } else if (name != "base") {
            found.others.push_back(entry.path());
        }
    }
    std::sort(found.others.begin(), found.others.end());
    std::sort(found.cpu.begin(), found.cpu.end(), [](const cpu_variant & a, const cpu_variant & b) {
        return a.score != b.score ? a.score > b.score : a.name < b.name;
    });
    return found;
}

const modules & known() {
    static const modules found = find_modules();
    return found;
}

// the one that is registered; nullptr: none
const cpu_variant * in_force = nullptr;

// the variants in the order in which they are tried: the one that DRAFTWOOD_CPU names, then the best first
std::vector<const cpu_variant *> candidates() {
    const char *                     wanted = std::getenv("DRAFTWOOD_CPU");
    std::vector<const cpu_variant *> out;
    for (const cpu_variant & each : known().cpu) {
        if (each.score > 0) {
            const bool first = wanted != nullptr && each.name == wanted;
            out.insert(first ? out.begin() : out.end(), &each);
        }
    }
    return out;
}

} // namespace

std::vector<ggml_backend_reg_t> dw_backend_modules() {
    std::vector<ggml_backend_reg_t> registered;
    for (const fs::path & path : known().others) {
        if (const ggml_backend_reg_t reg = load(path)) {
            registered.push_back(reg);
        }
    }
    for (const cpu_variant * variant : candidates()) {
        if (const ggml_backend_reg_t reg = load(variant->path)) {
            registered.push_back(reg);
            in_force = variant;
            break;
        }
    }
    return registered;
}

const char * dw_backend_folder() {
    static const std::string folder = own_folder().string();
    return folder.c_str();
}

const char * dw_cpu_variants(void) {
    static const std::string text = [] {
        std::string out;
        for (const cpu_variant & each : known().cpu) {
            out += (out.empty() ? "" : ",") + each.name + ":" + std::to_string(each.score);
        }
        return out;
    }();
    return text.c_str();
}

const char * dw_cpu_variant(void) {
    ggml_backend_reg_count(); // makes the registry, which calls dw_backend_modules()
    return in_force == nullptr ? "" : in_force->name.c_str();
}
