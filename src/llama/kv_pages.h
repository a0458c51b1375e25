// Where sequences that share a KV cache have their cells: in pages, each of one sequence, in ascending order. A sum
// over cells then has the order that it would have in a cache of the sequence's own: a cell's place in its page follows
// from its position, kernels on CPUs add up whole pages alike wherever these lie, and cells that a row does not see add
// nothing. llama.cpp takes the next free cells instead, so other sequences decide which cells stand side by side, and a
// row rounds by that.
// Must not know: contexts, graphs. Test: tests/model/test_kv_pages.py.

#pragma once

#include <cstdint>
#include <vector>

struct llama_ubatch;
class llama_kv_cells;

namespace draftwood {

// A multiple of the cells that any CPU kernel adds up side by side.
constexpr uint32_t cells_of_a_page = 64;

// Appends a cell for each row of the ubatch to `found`: the one behind the newest of its sequence. If a page ends
// there, or another sequence has that cell, it is the cell at the same place of the next free page. Returns false, and
// leaves `found` alone, if there is no such page.
bool find_in_pages(const llama_kv_cells & cells, const llama_ubatch & ubatch, std::vector<uint32_t> & found);

} // namespace draftwood
