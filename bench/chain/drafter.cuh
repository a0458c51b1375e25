// The ops of a layer of 35B-A3B's DFlash drafter on random weights and a KV cache. Must not know: how they are
// timed.

#pragma once

#include "chain/caches.cuh"

namespace chain {

constexpr int64_t n_draft_queries = 32, n_draft_keys = 4, draft_size = 128, draft_hidden = 6144;
constexpr int64_t draft_q_width = n_draft_queries * draft_size, draft_kv_width = n_draft_keys * draft_size;

struct drafter_weights {
    cells_of_cache cells;
    ggml_tensor *  norm    = floats({ width }, 0.1f, 1.0f);
    ggml_tensor *  q       = weights(GGML_TYPE_Q8_0, { width, draft_q_width });
    ggml_tensor *  k       = weights(GGML_TYPE_Q8_0, { width, draft_kv_width });
    ggml_tensor *  v       = weights(GGML_TYPE_Q8_0, { width, draft_kv_width });
    ggml_tensor *  q_norm  = floats({ draft_size }, 0.1f, 1.0f);
    ggml_tensor *  k_norm  = floats({ draft_size }, 0.1f, 1.0f);
    ggml_tensor *  k_cache = cells.rows(draft_kv_width);
    ggml_tensor *  v_cache = cells.rows(draft_kv_width);
    ggml_tensor *  out     = weights(GGML_TYPE_Q8_0, { draft_q_width, width }, 0.3f);
    ggml_tensor *  after   = floats({ width }, 0.1f, 1.0f);
    ggml_tensor *  gate    = weights(GGML_TYPE_Q8_0, { width, draft_hidden });
    ggml_tensor *  up      = weights(GGML_TYPE_Q8_0, { width, draft_hidden });
    ggml_tensor *  down    = weights(GGML_TYPE_Q8_0, { draft_hidden, width }, 0.3f);

    explicit drafter_weights(const cells_of_cache & cells) :
        cells(cells) {}
};

// What layers of a drafter hand on for a block of n rows.
class rows_of_drafter {
  public:
    rows_of_drafter(const rows_of_layers & rows, const cells_of_cache & of_cache) :
        n_(rows.n),
        x_(rows.x),
        between_(rows.between),
        places_(rows.n, of_cache, sight::all) {}

    std::vector<node> of_layer(const drafter_weights & w) const {
        auto * q    = rows_of_layers::view(inputs_, { draft_size, n_draft_queries, n_ }, 0);
        auto * k    = rows_of_layers::view(inputs_, { draft_size, n_draft_keys, n_ }, draft_q_width * n_);
        auto * v    = rows_of_layers::view(inputs_, { draft_kv_width, n_ }, (draft_q_width + draft_kv_width) * n_);
        auto * y    = rows_of_layers::view(result_, { draft_q_width, n_ }, 0);
        auto * keys = cells_of(w.k_cache, n_draft_keys), *values = cells_of(w.v_cache, n_draft_keys);
        return { { "inputs", &of::attention_inputs::on_cuda,
                   rows_of_layers::result(inputs_, { x_, w.norm, w.q, w.k, w.v }) },
                 { "heads", &of::attention_heads::on_cuda,
                   with_turns(
                       rows_of_layers::result(heads_, { q, w.q_norm, k, w.k_norm, v, places_.positions, places_.k_cells,
                                                        w.k_cache, places_.v_cells, w.v_cache }),
                       w.cells, draft_size, { 1, 0, 0, 0 }) },
                 { "attention", &of::flash_attention::on_cuda,
                   with_scale(rows_of_layers::result(result_, { by_head(heads_), keys, values, places_.mask }), w.cells,
                              draft_size) },
                 { "output", &of::attention_output::on_cuda,
                   rows_of_layers::result(between_, { y, w.out, x_, nullptr, result_ }) },
                 { "network", &of::feed_forward::on_cuda,
                   rows_of_layers::result(x_, { between_, w.after, w.gate, w.up, w.down }) } };
    }

  private:
    int64_t        n_;
    ggml_tensor *  x_, *between_;
    places_of_rows places_;
    ggml_tensor *  inputs_ = floats({ (draft_q_width + 2 * draft_kv_width) * n_ });
    ggml_tensor *  heads_  = floats({ draft_size, n_draft_queries, n_ });
    ggml_tensor *  result_ = floats({ (draft_q_width + of::flash_attention::n_gated(draft_q_width)) * n_ });
};

} // namespace chain
