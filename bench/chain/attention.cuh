// The ops of a gated attention layer of 35B-A3B on random weights and a KV cache. Must not know: how they are
// timed.

#pragma once

#include "chain/caches.cuh"

namespace chain {

constexpr int64_t n_queries = 16, n_key_heads = 2, head_size = 256;
constexpr int64_t q_width = 2 * n_queries * head_size, kv_width = n_key_heads * head_size; // a query's gate follows it

struct attention_weights {
    cells_of_cache cells;
    ggml_tensor *  norm    = floats({ width }, 0.1f, 1.0f);
    ggml_tensor *  q       = weights(GGML_TYPE_Q4_K, { width, q_width });
    ggml_tensor *  k       = weights(GGML_TYPE_Q4_K, { width, kv_width });
    ggml_tensor *  v       = weights(GGML_TYPE_Q6_K, { width, kv_width });
    ggml_tensor *  q_norm  = floats({ head_size }, 0.1f, 1.0f);
    ggml_tensor *  k_norm  = floats({ head_size }, 0.1f, 1.0f);
    ggml_tensor *  k_cache = cells.rows(kv_width);
    ggml_tensor *  v_cache = cells.rows(kv_width);
    ggml_tensor *  out     = weights(GGML_TYPE_Q4_K, { n_queries * head_size, width }, 0.3f);

    explicit attention_weights(const cells_of_cache & cells) :
        cells(cells) {}
};

// What attention layers hand on for n rows.
class rows_of_attention {
  public:
    rows_of_attention(const rows_of_layers & rows, const cells_of_cache & of_cache) :
        n_(rows.n),
        x_(rows.x),
        between_(rows.between),
        places_(rows.n, of_cache, sight::older) {}

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
        auto * keys = cells_of(w.k_cache, n_key_heads), *values = cells_of(w.v_cache, n_key_heads);
        return { { "inputs", &of::attention_inputs::on_cuda,
                   rows_of_layers::result(inputs_, { x_, w.norm, w.q, w.k, w.v }) },
                 { "heads", &of::attention_heads::on_cuda,
                   with_turns(
                       rows_of_layers::result(heads_, { q, w.q_norm, k, w.k_norm, v, places_.positions, places_.k_cells,
                                                        w.k_cache, places_.v_cells, w.v_cache }),
                       w.cells, 64, { 11, 11, 10, 0 }) },
                 { "attention", &of::flash_attention::on_cuda,
                   with_scale(
                       rows_of_layers::result(result_, { by_head(heads_), keys, values, places_.mask, nullptr, gate }),
                       w.cells, head_size) },
                 { "output", &of::attention_output::on_cuda,
                   rows_of_layers::result(between_, { y, w.out, x_, gate, result_ }) } };
    }

  private:
    int64_t        n_;
    ggml_tensor *  x_, *between_;
    places_of_rows places_;
    ggml_tensor *  inputs_ = floats({ (q_width + 2 * kv_width) * n_ });
    ggml_tensor *  heads_  = floats({ head_size, n_queries, n_ });
    ggml_tensor *  result_ =
        floats({ (n_queries * head_size + of::flash_attention::n_gated(n_queries * head_size)) * n_ });
};

} // namespace chain
