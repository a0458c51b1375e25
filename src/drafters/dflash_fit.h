// Checks from the header, before llama.cpp loads the file, whether a DFlash drafter fits its target. A misfit would hit
// a GGML_ASSERT in llama.cpp's loader or graph (src/models/dflash.cpp), or draft nonsense. Heads: gguf_fields.cpp.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct llama_model;

namespace draftwood {

// What of a target a drafter has to fit. Test: tests/model/test_probe_drafter.py holds both makers to the same words.
struct target_facts {
    explicit target_facts(const llama_model * model);
    explicit target_facts(const char * path); // from its header; throws failure with DW_ERR_FILE

    std::string              architecture;
    int32_t                  n_layers; // without MTP blocks
    int32_t                  width;    // of its hidden states
    std::vector<std::string> tokens;   // texts, as llama.cpp names them
};

struct dflash_file {
    int64_t bytes;
    int32_t block_size; // positions that a draft may have, the newest token's among them
};

// throws failure with DW_ERR_FILE for a file that cannot be read, with DW_ERR_UNSUPPORTED for a misfit
dflash_file require_dflash_for(const target_facts & target, const char * path);

} // namespace draftwood
