// See kv_pages.h.

#include "llama/kv_pages.h"

#include "llama-batch.h"
#include "llama-kv-cells.h"

#include <algorithm>
#include <optional>

namespace draftwood {

namespace {

// The newest cell of a sequence; none: it is empty.
struct end_of_text {
    llama_seq_id            seq;
    std::optional<uint32_t> cell;
};

// Finds cells for one ubatch. What it has found counts as taken.
class page_search {
  public:
    explicit page_search(const llama_kv_cells & cells) :
        cells_(cells) {}

    std::optional<uint32_t> next(llama_seq_id seq, llama_pos pos) {
        end_of_text &                 end  = end_of(seq);
        const std::optional<uint32_t> cell = end.cell ? behind(end) : in_free_page(0, pos % cells_of_a_page);
        end.cell                           = cell;
        return cell;
    }

  private:
    end_of_text & end_of(llama_seq_id seq) {
        const auto is_its = [&](const end_of_text & each) { return each.seq == seq; };
        const auto found  = std::find_if(ends_.begin(), ends_.end(), is_its);
        if (found != ends_.end()) {
            return *found;
        }
        const auto & placed = cells_.seq_pos_get(seq);
        ends_.push_back({ seq, placed.empty() ? std::nullopt : std::optional(placed.rbegin()->second) });
        return ends_.back();
    }

    std::optional<uint32_t> behind(const end_of_text & end) {
        const uint32_t cell = *end.cell + 1, place = cell % cells_of_a_page;
        if (place != 0 && cell < cells_.size() && cells_.is_empty(cell) && !is_taken(cell, end)) {
            return cell;
        }
        return in_free_page(*end.cell / cells_of_a_page + 1, place);
    }

    // Another sequence, which shares cells of this page, went on in it.
    bool is_taken(uint32_t cell, const end_of_text & by) const {
        return std::any_of(ends_.begin(), ends_.end(), [&](const end_of_text & each) {
            return &each != &by && each.cell && *each.cell >= cell &&
                   *each.cell / cells_of_a_page == cell / cells_of_a_page;
        });
    }

    std::optional<uint32_t> in_free_page(uint32_t first, uint32_t place) {
        const uint32_t n_pages = cells_.size() / cells_of_a_page;
        for (uint32_t page = first; page < n_pages; ++page) {
            if (is_free(page)) {
                new_pages_.push_back(page);
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
        return std::find(new_pages_.begin(), new_pages_.end(), page) == new_pages_.end();
    }

    const llama_kv_cells &   cells_;
    std::vector<end_of_text> ends_;
    std::vector<uint32_t>    new_pages_;
};

} // namespace

bool find_in_pages(const llama_kv_cells & cells, const llama_ubatch & ubatch, std::vector<uint32_t> & found) {
    page_search  search(cells);
    const size_t n_before = found.size();
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const std::optional<uint32_t> cell = search.next(ubatch.seq_id[i][0], ubatch.pos[i]);
        if (!cell) {
            found.resize(n_before);
            return false;
        }
        found.push_back(*cell);
    }
    return true;
}

} // namespace draftwood
