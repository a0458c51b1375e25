// Look at a GGUF's header before llama.cpp loads it, so that a bad file is refused in words.

#pragma once

#include "draftwood.h"

namespace draftwood {

// fills `info`; throws failure with DW_ERR_FILE
void probe_model(const char * path, dw_model_info & info);

} // namespace draftwood
