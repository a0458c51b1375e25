// What a GGUF's header says of drafting with it, before llama.cpp loads it.

#pragma once

#include "draftwood.h"

namespace draftwood {

// fills `info`; throws failure with DW_ERR_FILE
void probe_model(const char * path, dw_model_info & info);

} // namespace draftwood
