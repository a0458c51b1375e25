// Where sequences that share a KV cache have their cells. Each has pages of 64 cells, in ascending order, and sequences
// that share a beginning share its pages. A text from position 0 has the same places in pages as in a cache of its own,
// so kernels on CPUs add up its cells in the same order and groups; cells that a row does not see add nothing.
// llama.cpp takes the next free cells instead, so other sequences decide which cells stand side by side, and a row
// rounds by that.
//
// A row may still round otherwise than in a cache of its own
// - behind a beginning that is shared up to the middle of a page, without flash attention,
// - in a context whose whole state was loaded (llama_state_set_data packs cells),
// - once no free page lies behind its sequence's last one, or another such sequence took the next cell of its page,
// - in the cache of layers with a sliding window, which has no pages.
//
// Must not know: contexts, graphs. Test: tests/model/test_kv_pages.py.

#pragma once

#include <cstdint>
#include <vector>

struct llama_ubatch;
class llama_kv_cells;

namespace draftwood {

// A multiple of the cells that kernels on x86, NEON and 256-bit SVE add up side by side.
constexpr uint32_t cells_of_a_page = 64;

// Appends a cell for each row of the ubatch to `found`: the one behind the newest of its sequence. If a page ends
// there, or another sequence has that cell, it is the cell at the same place of the next free page behind; without one,
// of the first free page; without any, the first free cell. Returns false, and leaves `found` alone, if all cells are
// taken.
bool find_in_pages(const llama_kv_cells & cells, const llama_ubatch & ubatch, std::vector<uint32_t> & found);

} // namespace draftwood
