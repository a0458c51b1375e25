// A context's masks and cells as draftwood finds them beside llama.cpp's own, for tests. Must not know: engines.
// Test: tests/model/test_kq_mask.py.

#pragma once

#include "llama.h"

#include <cstdint>

namespace draftwood {

// Rows of a mask f32 or f16 [n_kv, n_rows / n_streams, 1, n_streams]. The caller owns what is pointed to.
struct mask_rows {
    int32_t         n_rows, n_streams, n_pos;
    bool            causal, f16;
    const int32_t * seq_ids;   // [n_rows]
    const int32_t * positions; // [n_pos][n_rows]
    int32_t         n_kv;
};

// Writes llama.cpp's mask and ours, each f32[n_rows][n_kv]; ours is 7 everywhere if it is not filled. Returns whether
// it is. Errors: DW_ERR_ARGUMENT for rows or cells that the cache does not have, DW_ERR_UNSUPPORTED for other memories.
bool compare_kq_masks(llama_context * ctx, const mask_rows & of, float * masks, float * ours);

// The number of the last cell in use, plus one. Errors: DW_ERR_UNSUPPORTED for other memories.
int32_t end_of_cells(llama_context * ctx);

// Removes cells of the context's KV cache as llama_kv_cache::dw_remove_from does; recurrent states beside it stay.
// Errors: as above.
void remove_from_cache(llama_context * ctx, llama_seq_id seq, llama_pos pos);

} // namespace draftwood
