// See kq_mask.h.

#include "llama/kq_mask.h"

#include "ggml-backend.h"
#include "llama-batch.h"
#include "llama-kv-cache.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

namespace draftwood {

namespace {

constexpr size_t     n_late_max = 256; // cells that each row is compared with
std::atomic<int64_t> n_filled;

// A cell of a sequence at the first position of its rows, or behind it.
struct late_cell {
    uint32_t          at;
    llama_pos         pos;
    llama_kv_cell_ext place; // in two dimensions, of M-RoPE
};

// What rows of a sequence see: its cells but for some of the late ones.
struct sequence_of_mask {
    llama_seq_id           seq;
    const llama_kv_cells * cells;
    llama_pos              first_pos; // of its rows
    uint32_t               n_used;    // cells up to the last one of any sequence
    bool                   has_all;   // they are all its own
    std::vector<late_cell> late;
    int64_t                first_row = -1; // of the mask, once it is filled
};

// A row of a mask has 0 where it sees a cell, and where not: found once for many cells, as a conversion is a call.
template <typename T> T dropped();
template <> float       dropped<float>() {
    return -INFINITY;
}
template <> ggml_fp16_t dropped<ggml_fp16_t>() {
    return ggml_fp32_to_fp16(-INFINITY);
}

// nullptr: it is not among them
sequence_of_mask * find_sequence(std::vector<sequence_of_mask> & all, llama_seq_id seq) {
    const auto is_here = [&](const sequence_of_mask & each) { return each.seq == seq; };
    const auto here    = std::find_if(all.begin(), all.end(), is_here);
    return here == all.end() ? nullptr : &*here;
}

// The sequences of the ubatch's rows, and the first position of each.
std::vector<sequence_of_mask> sequences_of(const llama_kv_cache & cache, const llama_ubatch & ubatch) {
    std::vector<sequence_of_mask> found;
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const llama_seq_id seq = ubatch.seq_id[i][0];
        if (sequence_of_mask * here = find_sequence(found, seq)) {
            here->first_pos = std::min(here->first_pos, ubatch.pos[i]);
        } else {
            found.push_back({ seq, &cache.get_cells(seq), ubatch.pos[i], 0, false, {} });
        }
    }
    return found;
}

// Whether a mask of so many cells has all of the sequence's, and few of them are late.
bool find_cells(sequence_of_mask & of, int64_t n_kv, bool causal) {
    const auto & placed = of.cells->seq_pos_get(of.seq);
    of.n_used           = of.cells->used_max_p1();
    of.has_all          = placed.size() == of.n_used;
    if (of.n_used > n_kv) {
        return false;
    }
    for (auto each = placed.lower_bound({ of.first_pos, 0 }); causal && each != placed.end(); ++each) {
        if (of.late.size() == n_late_max) {
            return false;
        }
        of.late.push_back({ each->second, each->first, of.cells->ext_get(each->second) });
    }
    return true;
}

// All cells of the sequence.
template <typename T> void fill_cells(T * to, int64_t n_kv, const sequence_of_mask & of) {
    const T drop = dropped<T>();
    if (of.has_all) {
        std::fill(to, to + of.n_used, T{});
    } else {
        for (uint32_t i = 0; i < of.n_used; ++i) { // an empty cell has no sequence
            to[i] = of.cells->seq_has(i, of.seq) ? T{} : drop;
        }
    }
    std::fill(to + of.n_used, to + n_kv, drop);
}

template <typename T>
void fill_row(T * mask, int64_t row, int64_t n_kv, sequence_of_mask & of, const llama_ubatch & ubatch) {
    T * const       to         = mask + row * n_kv;
    const T         drop       = dropped<T>();
    const llama_pos pos        = ubatch.pos[row];
    const bool      has_places = ubatch.is_pos_2d();
    if (of.first_row < 0) {
        fill_cells(to, n_kv, of);
        of.first_row = row;
    } else {
        std::copy_n(mask + of.first_row * n_kv, n_kv, to);
    }
    for (const late_cell & cell : of.late) {
        const bool is_beside =
            has_places && cell.pos == pos &&
            cell.place.is_2d_gt(ubatch.pos[row + ubatch.n_tokens * 2], ubatch.pos[row + ubatch.n_tokens]);
        to[cell.at] = cell.pos > pos || is_beside ? drop : T{};
    }
}

} // namespace

bool fill_kq_mask(const llama_kv_cache & cache, ggml_tensor & mask, const llama_ubatch & ubatch, bool causal) {
    const int64_t                 n_kv      = mask.ne[0];
    std::vector<sequence_of_mask> sequences = sequences_of(cache, ubatch);
    for (sequence_of_mask & each : sequences) {
        if (!find_cells(each, n_kv, causal)) {
            return false;
        }
    }
    for (int64_t row = 0; row < ubatch.n_tokens; ++row) {
        sequence_of_mask & of = *find_sequence(sequences, ubatch.seq_id[row][0]);
        if (mask.type == GGML_TYPE_F16) {
            fill_row((ggml_fp16_t *) mask.data, row, n_kv, of, ubatch);
        } else {
            fill_row((float *) mask.data, row, n_kv, of, ubatch);
        }
    }
    ++n_filled;
    return true;
}

int64_t n_filled_kq_masks() noexcept {
    return n_filled;
}

} // namespace draftwood
