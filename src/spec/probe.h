// Look at a GGUF's header before llama.cpp loads it, so that a bad file is refused in words.

#pragma once

#include "draftwood.h"

namespace draftwood {

// fills `info`; throws failure with DW_ERR_FILE
void probe_model(const char * path, dw_model_info & info);

// Returns the file's bytes; throws failure unless it is a DFlash drafter of the plain kind. Its kin (DFlash2, DSpark,
// other vocabularies), and heads of two sizes, have layouts that meet a GGML_ASSERT in llama.cpp's loader or graph
// (src/models/dflash.cpp). Test: tests/model/test_dflash.py.
int64_t require_plain_dflash(const char * path);

} // namespace draftwood
