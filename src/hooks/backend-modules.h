// Which backend modules ggml registers: those beside libdraftwood-ggml, and of the CPU modules the best that this CPU
// runs. Part of the ggml target; the patched registry calls it.

#pragma once

#include "ggml-backend.h"

#ifdef __cplusplus
#include <string>
#include <vector>

// Paths of the modules in the order of registration, the CPU's last. Files are named
// libdraftwood-ggml-BACKEND.so and libdraftwood-ggml-cpu-VARIANT.so; a native build's CPU module has no VARIANT.
// DRAFTWOOD_CPU names the variant to take. If it names none that runs here, the best one is taken, and
// draftwood's Python code refuses to load a model. If no variant runs here, the list holds none.
std::vector<std::string> dw_backend_modules();

extern "C" {
#endif

// The CPU modules as "name:score" joined by commas, best first: ggml's score of the features that each uses, 0 where
// this CPU lacks one. The first with a score above 0 is the one to load, unless DRAFTWOOD_CPU names another. A native
// build's module is called "native". Owned by the library.
// Test: tests/model/test_cpu_variants.py.
GGML_BACKEND_API const char * dw_cpu_variants(void);

#ifdef __cplusplus
}
#endif
