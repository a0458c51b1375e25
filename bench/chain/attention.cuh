// The ops of a gated attention layer of 35B-A3B on random weights and a KV cache of F16. Must not know: how they are
// timed.

#pragma once

#include "chain/layers.cuh"

#include <utility>

namespace chain {

constexpr int64_t n_queries = 16, n_key_heads = 2, head_size = 256;
constexpr int64_t q_width = 2 * n_queries * head_size, kv_width = n_key_heads * head_size; // a query's gate follows it

static __global__ void fill_halfs(half * to, size_t n, uint32_t seed) {
    for (size_t i = blockIdx.x * (size_t) blockDim.x + threadIdx.x; i < n; i += (size_t) gridDim.x * blockDim.x) {
        to[i] = __float2half((float) (random_bits(i, seed) & 0xffffff) / 8388608.0f - 1.0f);
    }
}

// random values of a cache
inline ggml_tensor * halfs(const std::vector<int64_t> & shape) {
    ggml_tensor * made = tensor(GGML_TYPE_F16, shape, nullptr);
    made->data         = memory(ggml_nbytes(made));
    fill_halfs<<<1024, 256>>>((half *) made->data, ggml_nelements(made), next_seed++);
    return made;
}

// Cells that rows see, the newest among the last few, and behind them those that none sees.
struct cells_of_cache {
    int64_t n_seen, n_unseen;

    int64_t n_all() const { return n_seen + n_unseen; }
};

struct attention_weights {
    cells_of_cache cells;
    ggml_tensor *  norm    = floats({ width }, 0.1f, 1.0f);
    ggml_tensor *  q       = weights(GGML_TYPE_Q4_K, { width, q_width });
    ggml_tensor *  k       = weights(GGML_TYPE_Q4_K, { width, kv_width });
    ggml_tensor *  v       = weights(GGML_TYPE_Q6_K, { width, kv_width });
    ggml_tensor *  q_norm  = floats({ head_size }, 0.1f, 1.0f);
    ggml_tensor *  k_norm  = floats({ head_size }, 0.1f, 1.0f);
    ggml_tensor *  k_cache = halfs({ kv_width, cells.n_all() });
    ggml_tensor *  v_cache = halfs({ kv_width, cells.n_all() });
    ggml_tensor *  out     = weights(GGML_TYPE_Q4_K, { n_queries * head_size, width }, 0.3f);

    explicit attention_weights(const cells_of_cache & cells) :
        cells(cells) {}
};

// What attention layers hand on for n rows, and the inputs of the graph: row r is token n_seen - max_rows + r of one
// text, and lies in the cell of that number.
class rows_of_attention {
  public:
    rows_of_attention(const rows_of_layers & rows, const cells_of_cache & of_cache) :
        n_(rows.n),
        n_cells_(of_cache.n_all()),
        x_(rows.x),
        between_(rows.between) {
        const int64_t        first = of_cache.n_seen - of::max_rows;
        std::vector<int32_t> places(4 * n_);
        std::vector<int64_t> cells(n_);
        std::vector<half>    seen(n_ * n_cells_, __float2half(-INFINITY));
        for (int64_t r = 0; r < n_; ++r) {
            cells[r] = first + r;
            std::fill_n(seen.begin() + r * n_cells_, first + r + 1, __float2half(0.0f));
            for (int64_t section = 0; section < 4; ++section) {
                places[section * n_ + r] = (int32_t) (first + r);
            }
        }
        positions_ = input(GGML_TYPE_I32, { 4 * n_ }, places);
        k_cells_   = input(GGML_TYPE_I64, { n_ }, cells);
        v_cells_   = input(GGML_TYPE_I64, { n_ }, cells);
        mask_      = input(GGML_TYPE_F16, { n_cells_, n_ }, seen);
    }

    std::vector<node> of_layer(const attention_weights & w) const {
        const auto heads_in = [&](int64_t heads, int64_t step, int64_t first) {
            ggml_tensor * made = rows_of_layers::view(inputs_, { head_size, heads, n_ }, first);
            made->nb[1]        = step * head_size * sizeof(float);
            made->nb[2]        = heads * made->nb[1];
            return made;
        };
        auto * q    = heads_in(n_queries, 2, 0);
        auto * gate = heads_in(n_queries, 2, head_size);
        auto * k    = heads_in(n_key_heads, 1, q_width * n_);
        auto * v    = rows_of_layers::view(inputs_, { kv_width, n_ }, (q_width + kv_width) * n_);
        auto * y    = rows_of_layers::view(result_, { n_queries * head_size, n_ }, 0);
        return { { "inputs", &of::attention_inputs::on_cuda,
                   rows_of_layers::result(inputs_, { x_, w.norm, w.q, w.k, w.v }) },
                 { "heads", &of::attention_heads::on_cuda,
                   with_turns(rows_of_layers::result(heads_, { q, w.q_norm, k, w.k_norm, v, positions_, k_cells_,
                                                               w.k_cache, v_cells_, w.v_cache })) },
                 { "attention", &of::flash_attention::on_cuda,
                   with_scale(rows_of_layers::result(
                       result_, { by_head(heads_), cells_of(w.k_cache), cells_of(w.v_cache), mask_, nullptr, gate })) },
                 { "output", &of::attention_output::on_cuda,
                   rows_of_layers::result(between_, { y, gate, w.out, x_, result_ }) } };
    }

  private:
    template <typename value>
    static ggml_tensor * input(ggml_type type, const std::vector<int64_t> & shape, const std::vector<value> & values) {
        ggml_tensor * made = tensor(type, shape, memory(values.size() * sizeof(value)));
        CUDA_CHECK(cudaMemcpy(made->data, values.data(), values.size() * sizeof(value), cudaMemcpyHostToDevice));
        return made;
    }

    // [S, H, n] as [S, n, H]
    static ggml_tensor * by_head(ggml_tensor * of) {
        auto * made = new ggml_tensor(*of);
        std::swap(made->ne[1], made->ne[2]);
        std::swap(made->nb[1], made->nb[2]);
        return made;
    }

    // a cache as [S, cells, Hk]
    ggml_tensor * cells_of(ggml_tensor * cache) const {
        ggml_tensor * made = tensor(GGML_TYPE_F16, { head_size, n_cells_, n_key_heads }, cache->data);
        made->nb[1]        = cache->nb[1];
        made->nb[2]        = head_size * sizeof(half);
        made->nb[3]        = cache->nb[1] * n_cells_;
        return made;
    }

    static ggml_tensor * with_turns(ggml_tensor * heads) {
        of::settings with = of::settings_of(heads);
        with.n_dims       = 64;
        with.base         = 1e7f;
        with.scale        = 1.0f;
        with.sections[0] = with.sections[1] = 11;
        with.sections[2]                    = 10;
        of::set(heads, with);
        return heads;
    }

    static ggml_tensor * with_scale(ggml_tensor * attention) {
        of::settings with = of::settings_of(attention);
        with.scale        = 1.0f / 16.0f;
        of::set(attention, with);
        return attention;
    }

    int64_t       n_, n_cells_;
    ggml_tensor * x_, *between_;
    ggml_tensor * inputs_ = floats({ (q_width + 2 * kv_width) * n_ });
    ggml_tensor * heads_  = floats({ head_size, n_queries, n_ });
    ggml_tensor * result_ =
        floats({ (n_queries * head_size + of::flash_attention::n_gated(n_queries * head_size)) * n_ });
    ggml_tensor *positions_, *k_cells_, *v_cells_, *mask_;
};

} // namespace chain
