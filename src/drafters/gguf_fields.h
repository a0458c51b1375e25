// The fields of a GGUF's header that llama.cpp takes as they are: values that would end the process later.

#pragma once

namespace draftwood {

class gguf_header;

// Throws failure with DW_ERR_FILE for a value that no model can have. Fields that are absent or of another type
// are left to llama.cpp where it refuses them itself. Test: tests/model/test_damaged_header.py.
void require_sound_fields(const gguf_header & header, const char * path);

} // namespace draftwood
