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

struct stream_of_mask {
    uint32_t               n_used; // cells, the first ones
    std::vector<late_cell> late;
};

template <typename T> constexpr T keeps() {
    return {};
}
template <typename T> T drops() {
    return -INFINITY;
}
template <> ggml_fp16_t drops<ggml_fp16_t>() {
    return ggml_fp32_to_fp16(-INFINITY);
}

// Whether the ubatch's rows [first, first + n) are of one sequence, and its cells as fill_kq_mask wants them.
bool find_stream(const llama_kv_cache & cache, const llama_ubatch & ubatch, int64_t first, int64_t n, int64_t n_kv,
                 bool causal, stream_of_mask & found) {
    const llama_seq_id seq = ubatch.seq_id[first][0];
    llama_pos          pos = ubatch.pos[first];
    for (int64_t i = first; i < first + n; ++i) {
        if (ubatch.seq_id[i][0] != seq) {
            return false;
        }
        pos = std::min(pos, ubatch.pos[i]);
    }
    const llama_kv_cells & cells  = cache.get_cells(seq);
    const auto &           placed = cells.seq_pos_get(seq);
    found.n_used                  = cells.used_max_p1();
    if (placed.size() != found.n_used || cells.get_used() != found.n_used || found.n_used > n_kv) {
        return false;
    }
    for (auto each = placed.lower_bound({ pos, 0 }); causal && each != placed.end(); ++each) {
        if (found.late.size() == n_late_max) {
            return false;
        }
        found.late.push_back({ each->second, each->first, cells.ext_get(each->second) });
    }
    return true;
}

template <typename T>
void fill_row(T * to, int64_t n_kv, const stream_of_mask & stream, const llama_ubatch & ubatch, int64_t row) {
    const llama_pos pos        = ubatch.pos[row];
    const bool      has_places = ubatch.is_pos_2d();
    std::fill(to, to + stream.n_used, keeps<T>());
    std::fill(to + stream.n_used, to + n_kv, drops<T>());
    for (const late_cell & cell : stream.late) {
        const bool is_beside =
            has_places && cell.pos == pos &&
            cell.place.is_2d_gt(ubatch.pos[row + ubatch.n_tokens * 2], ubatch.pos[row + ubatch.n_tokens]);
        if (cell.pos > pos || is_beside) {
            to[cell.at] = drops<T>();
        }
    }
}

} // namespace

bool fill_kq_mask(const llama_kv_cache & cache, ggml_tensor & mask, const llama_ubatch & ubatch, bool causal) {
    const int64_t               n_kv = mask.ne[0], n_streams = mask.ne[3], n_rows = ubatch.n_tokens / n_streams;
    std::vector<stream_of_mask> streams(n_streams);
    for (int64_t s = 0; s < n_streams; ++s) {
        if (!find_stream(cache, ubatch, s * n_rows, n_rows, n_kv, causal, streams[s])) {
            return false;
        }
    }
    for (int64_t row = 0; row < n_rows * n_streams; ++row) {
        const stream_of_mask & stream = streams[row / n_rows];
        if (mask.type == GGML_TYPE_F16) {
            fill_row((ggml_fp16_t *) mask.data + row * n_kv, n_kv, stream, ubatch, row);
        } else {
            fill_row((float *) mask.data + row * n_kv, n_kv, stream, ubatch, row);
        }
    }
    ++n_filled;
    return true;
}

int64_t n_filled_kq_masks() noexcept {
    return n_filled;
}

} // namespace draftwood
