// See kv_pages.h.

#include "llama/kv_pages.h"

#include "llama-batch.h"
#include "llama-kv-cells.h"

#include <algorithm>
#include <map>
#include <optional>

namespace draftwood {

namespace {

using cell_or_none = std::optional<uint32_t>;

uint32_t page_of(uint32_t cell) {
    return cell / cells_of_a_page;
}

// Finds cells for one ubatch. What it has found counts as taken.
class page_search {
  public:
    page_search(const llama_kv_cells & cells, std::vector<uint32_t> & found) :
        cells_(cells),
        found_(found) {}

    // Whether the row has a cell now. seqs: its n sequences.
    bool add(const llama_seq_id * seqs, int32_t n, llama_pos pos) {
        const cell_or_none end  = end_of(seqs[0]);
        cell_or_none       cell = end ? behind(*end) : in_free_page(0, pos % cells_of_a_page);
        cell                    = cell ? cell : any();
        if (!cell) {
            return false;
        }
        for (int32_t i = 0; i < n; ++i) {
            ends_[seqs[i]] = *cell;
        }
        const auto [newest, is_new] = newest_.try_emplace(page_of(*cell), *cell);
        newest->second              = std::max(newest->second, *cell);
        found_.push_back(*cell);
        if (!is_found_.empty()) {
            is_found_[*cell] = true;
        }
        return true;
    }

  private:
    // The newest cell of a sequence; none: it is empty.
    cell_or_none end_of(llama_seq_id seq) const {
        const auto known = ends_.find(seq);
        if (known != ends_.end()) {
            return known->second;
        }
        const auto & placed = cells_.seq_pos_get(seq);
        return placed.empty() ? std::nullopt : cell_or_none(placed.rbegin()->second);
    }

    cell_or_none behind(uint32_t end) const {
        const uint32_t cell = end + 1, place = cell % cells_of_a_page;
        if (place != 0 && cell < cells_.size() && cells_.is_empty(cell) && !is_taken(cell)) {
            return cell;
        }
        const cell_or_none found = in_free_page(page_of(end) + 1, place);
        return found ? found : in_free_page(0, place);
    }

    // A sequence that shares cells of this page went on in it.
    bool is_taken(uint32_t cell) const {
        const auto newest = newest_.find(page_of(cell));
        return newest != newest_.end() && newest->second >= cell;
    }

    cell_or_none in_free_page(uint32_t first, uint32_t place) const {
        const uint32_t n_pages = cells_.size() / cells_of_a_page;
        for (uint32_t page = first; page < n_pages; ++page) {
            if (is_free(page)) {
                return page * cells_of_a_page + place;
            }
        }
        return std::nullopt;
    }

    bool is_free(uint32_t page) const {
        for (uint32_t cell = page * cells_of_a_page; cell < (page + 1) * cells_of_a_page; ++cell) {
            if (!cells_.is_empty(cell)) {
                return false;
            }
        }
        return newest_.find(page) == newest_.end();
    }

    // the first free cell
    cell_or_none any() {
        if (is_found_.empty()) {
            is_found_.resize(cells_.size());
            for (const uint32_t cell : found_) {
                is_found_[cell] = true;
            }
        }
        while (lowest_ < cells_.size() && (is_found_[lowest_] || !cells_.is_empty(lowest_))) {
            ++lowest_;
        }
        return lowest_ < cells_.size() ? cell_or_none(lowest_) : std::nullopt;
    }

    const llama_kv_cells &           cells_;
    std::vector<uint32_t> &          found_;
    std::map<llama_seq_id, uint32_t> ends_;       // of sequences with rows in this ubatch
    std::map<uint32_t, uint32_t>     newest_;     // by page: the last cell that was found there
    std::vector<bool>                is_found_;   // by cell, once any() needs it
    uint32_t                         lowest_ = 0; // no cell below is free
};

} // namespace

bool find_in_pages(const llama_kv_cells & cells, const llama_ubatch & ubatch, std::vector<uint32_t> & found) {
    const size_t n_before = found.size();
    page_search  search(cells, found);
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        if (!search.add(ubatch.seq_id[i], ubatch.n_seq_id[i], ubatch.pos[i])) {
            found.resize(n_before);
            return false;
        }
    }
    return true;
}

} // namespace draftwood
