// Which backend modules ggml registers: those beside libdraftwood-ggml, and of the CPU modules the best that this CPU
// runs. Part of the ggml target; the patched registry calls it.

#pragma once

#include "ggml-backend.h"

#ifdef __cplusplus
#include <vector>

// Loads the modules and returns what they register, the CPU's last. A module that cannot be loaded, such as CUDA's
// without a driver, is left out with an error in ggml's log.
// Files are named libdraftwood-ggml-BACKEND.so and libdraftwood-ggml-cpu-VARIANT.so; a native build's CPU module has no
// VARIANT. DRAFTWOOD_CPU names the variant to take. If it names none that runs here, the best one is taken, and
// draftwood's Python code refuses to load a model.
// The modules stay for the life of the process.
std::vector<ggml_backend_reg_t> dw_backend_modules();

// The folder that they lie in. ggml's own search is sent there too: by itself it would look for libggml-*.so, which
// none of ours is called, in the working folder.
const char * dw_backend_folder();

extern "C" {
#endif

// The CPU modules as "name:score" joined by commas, best first: ggml's score of the features that each uses, 0 where
// this CPU lacks one. A native build's module is called "native". Owned by the library.
// Test: tests/model/test_cpu_variants.py.
GGML_BACKEND_API const char * dw_cpu_variants(void);

// Name of the CPU module that ggml has registered, empty if none runs here. Owned by the library.
GGML_BACKEND_API const char * dw_cpu_variant(void);

#ifdef __cplusplus
}
#endif
