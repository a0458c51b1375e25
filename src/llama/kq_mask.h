// The mask of a decode's attention, from the positions of a cache whose cells are all of one sequence. llama.cpp looks
// at each cell for it, 0.2 ms of a host for 32,768 of them, and a draft's graph waits for that. Must not know:
// contexts, graphs. Test: tests/model/test_kq_mask.py.

#pragma once

#include <cstdint>

struct ggml_tensor;
struct llama_ubatch;
class llama_kv_cache;

namespace draftwood {

// Fills mask, f32 or f16 [n_kv, rows / n_streams, 1, n_streams] in host memory, as llama_kv_cache::set_input_kq_mask
// does for attention without a window, causal or not. Returns false, and leaves it alone, unless each stream's used
// cells are its first ones and all are of the sequence of its rows, and of causal rows at most 256 cells lie at the
// lowest position or behind it.
bool fill_kq_mask(const llama_kv_cache & cache, ggml_tensor & mask, const llama_ubatch & ubatch, bool causal);

// Masks that were filled so far, of all caches: tests show by it that a decode took one.
int64_t n_filled_kq_masks() noexcept;

} // namespace draftwood
