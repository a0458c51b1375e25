// What this library was built from, for `draftwood doctor`. The values come from CMake, on this file alone, so
// that a new series hash recompiles one file.

#include "draftwood.h"

#define DW_STRING_(x) #x
#define DW_STRING(x) DW_STRING_(x)

const char * dw_build_info(void) {
    return "{\"pin_version\": \"" DRAFTWOOD_PIN_VERSION "\", \"pin_commit\": \"" DRAFTWOOD_PIN_COMMIT
           "\", \"series_hash\": \"" DRAFTWOOD_SERIES_HASH "\", \"build_type\": \"" DRAFTWOOD_BUILD_TYPE
           "\", \"cpu_features\": \"" DRAFTWOOD_CPU_FEATURES "\", \"cuda\": " DRAFTWOOD_CUDA ", \"rpc\": " DRAFTWOOD_RPC
#if defined(__clang__)
           ", \"compiler\": \"clang " __clang_version__ "\""
#elif defined(__GNUC__)
           ", \"compiler\": \"gcc " DW_STRING(__GNUC__) "." DW_STRING(__GNUC_MINOR__) "\""
#elif defined(_MSC_VER)
           ", \"compiler\": \"msvc " DW_STRING(_MSC_VER) "\""
#else
           ", \"compiler\": \"unknown\""
#endif
           "}";
}
