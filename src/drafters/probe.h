// What a GGUF's header says of drafting with it, before llama.cpp loads it.
// Test: tests/model/test_probe_drafter.py, test_bad_input.py, engine/test_creation.py.

#pragma once

#include "draftwood.h"

namespace draftwood {

// fills `info`; throws failure with DW_ERR_FILE
void probe_model(const char * path, dw_model_info & info);

} // namespace draftwood
