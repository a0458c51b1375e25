// The texts of a GGUF's header: UTF-8 where Python reads them, tokens that differ, and a tokenizer that finds what it
// looks up, as llama-vocab.cpp asserts or takes for granted.

#pragma once

namespace draftwood {

class gguf_header;

// throws failure with DW_ERR_FILE. Test: tests/model/test_damaged_header.py
void require_sound_texts(const gguf_header & header, const char * path);

} // namespace draftwood
