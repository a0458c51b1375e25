// What layers with attention share: KV caches of F16 or Q8_0, what rows see of them, and how ops of such a layer read
// them. Must not know: sizes of a layer.

#pragma once

#include "chain/layers.cuh"

#include <utility>

namespace chain {

// Cells that rows see, the newest among the last few, and behind them those that none sees.
struct cells_of_cache {
    int64_t   n_seen = 0, n_unseen = 0;
    ggml_type type = GGML_TYPE_F16;

    int64_t n_all() const { return n_seen + n_unseen; }
    // as llama.cpp transforms them for this type: values of a key, of a value
    int32_t k_hadamard(int64_t head_size) const { return type == GGML_TYPE_F16 ? 0 : (int32_t) head_size; }
    int32_t v_hadamard() const { return type == GGML_TYPE_F16 ? 0 : 64; }

    // keys or values of all cells
    ggml_tensor * rows(int64_t width) const {
        const float gain = 0.3f * sqrtf((float) width); // so that values are about 1 at most
        return type == GGML_TYPE_F16 ? halfs({ width, n_all() }) : weights(type, { width, n_all() }, gain);
    }
};

// older: each row sees the cells up to its own; all: those of the rows behind it, too
enum class sight { older, all };

// Inputs of a graph of n rows: row r is token n_seen - max_rows + r of one text, and lies in the cell of that number.
struct places_of_rows {
    ggml_tensor *positions, *k_cells, *v_cells, *mask;

    places_of_rows(int64_t n, const cells_of_cache & of_cache, sight of_rows) {
        const int64_t        first = of_cache.n_seen - of::max_rows, n_cells = of_cache.n_all();
        std::vector<int32_t> places(4 * n);
        std::vector<int64_t> cells(n);
        std::vector<half>    seen(n * n_cells, __float2half(-INFINITY));
        for (int64_t r = 0; r < n; ++r) {
            cells[r] = first + r;
            std::fill_n(seen.begin() + r * n_cells, of_rows == sight::all ? of_cache.n_seen : first + r + 1,
                        __float2half(0.0f));
            for (int64_t section = 0; section < 4; ++section) {
                places[section * n + r] = (int32_t) (first + r);
            }
        }
        positions = input(GGML_TYPE_I32, { 4 * n }, places);
        k_cells   = input(GGML_TYPE_I64, { n }, cells);
        v_cells   = input(GGML_TYPE_I64, { n }, cells);
        mask      = input(GGML_TYPE_F16, { n_cells, n }, seen);
    }
};

// [S, H, n] as [S, n, H]
inline ggml_tensor * by_head(ggml_tensor * of) {
    auto * made = new ggml_tensor(*of);
    std::swap(made->ne[1], made->ne[2]);
    std::swap(made->nb[1], made->nb[2]);
    return made;
}

// a cache [S Hk, cells] as [S, cells, Hk]
inline ggml_tensor * cells_of(ggml_tensor * cache, int64_t n_heads) {
    const int64_t head_size = cache->ne[0] / n_heads;
    ggml_tensor * made      = tensor(cache->type, { head_size, cache->ne[1], n_heads }, cache->data);
    made->nb[1]             = cache->nb[1];
    made->nb[2]             = ggml_row_size(cache->type, head_size);
    made->nb[3]             = cache->nb[1] * cache->ne[1];
    return made;
}

// n_dims: values of a head that turn; sections: of pairs
inline ggml_tensor * with_turns(ggml_tensor * heads, const cells_of_cache & cells, int32_t n_dims,
                                const uint8_t (&sections)[4]) {
    of::settings with = of::settings_of(heads);
    with.n_dims       = n_dims;
    with.base         = 1e7f;
    with.scale        = 1.0f;
    with.k_hadamard   = cells.k_hadamard(heads->ne[0]);
    with.v_hadamard   = cells.v_hadamard();
    std::copy_n(sections, 4, with.sections);
    of::set(heads, with);
    return heads;
}

inline ggml_tensor * with_scale(ggml_tensor * attention, const cells_of_cache & cells, int64_t head_size) {
    of::settings with = of::settings_of(attention);
    with.scale        = 1.0f / sqrtf((float) head_size);
    with.v_hadamard   = cells.v_hadamard();
    of::set(attention, with);
    return attention;
}

} // namespace chain
