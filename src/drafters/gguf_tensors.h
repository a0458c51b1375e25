// The types of a GGUF's tensors, as its header names them: those that llama.cpp loads and cannot compute with.

#pragma once

namespace draftwood {

class gguf_header;

// Of qwen35, qwen35moe and dflash. Throws failure with DW_ERR_FILE. Test: tests/model/test_damaged_header.py.
void require_sound_tensors(const gguf_header & header, const char * path);

} // namespace draftwood
