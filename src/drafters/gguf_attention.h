// Heads, rotated pairs and windows of attention, as a GGUF's header gives them.

#pragma once

namespace draftwood {

class gguf_values;

// Of qwen35, qwen35moe and dflash, whose fields are in range one by one: do they go together? Throws failure with
// DW_ERR_FILE. Test: tests/model/test_damaged_header.py, test_damaged_drafter_header.py.
void require_sound_attention(const gguf_values & file);

} // namespace draftwood
