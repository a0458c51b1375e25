// The texts of a GGUF's header: UTF-8 where Python reads them, and tokens that differ, as llama-vocab.cpp asserts.

#pragma once

namespace draftwood {

class gguf_header;

// throws failure with DW_ERR_FILE. Test: tests/model/test_damaged_header.py
void require_sound_texts(const gguf_header & header, const char * path);

} // namespace draftwood
