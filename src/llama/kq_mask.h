// The mask of a decode's attention. llama.cpp compares each cell of a cache with its rows, 0.2 ms of a host for 32,768
// cells, and a draft's graph waits for that. Here the cells that a row may not see are found by their positions; the
// others are all used cells, or those that have the row's sequence if there are several.
// Must not know: contexts, graphs. Test: tests/model/test_kq_mask.py.

#pragma once

#include <cstdint>

struct ggml_tensor;
struct llama_ubatch;
class llama_kv_cache;

namespace draftwood {

// Fills mask, f32 or f16 [n_kv, rows / n_streams, 1, n_streams] in host memory, as llama_kv_cache::set_input_kq_mask
// does for attention without a window, causal or not. Returns false, and leaves it alone, if it is shorter than the
// cells in use, or if more than 256 cells of a sequence with causal rows lie at the lowest of their positions or behind
// it.
bool fill_kq_mask(const llama_kv_cache & cache, ggml_tensor & mask, const llama_ubatch & ubatch, bool causal);

// Masks that were filled so far, of all caches: tests show by it that a decode took one.
int64_t n_filled_kq_masks() noexcept;

} // namespace draftwood
