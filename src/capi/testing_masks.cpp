// Masks of attention, for tests. Contract: draftwood-testing.h.

#include "draftwood-testing.h"

#include "capi/capi.h"
#include "ggml-cpp.h"
#include "llama-batch.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid.h"
#include "llama/kq_mask.h"

#include <algorithm>
#include <vector>

using namespace draftwood;

namespace {

llama_kv_cache & cache_of(llama_context * ctx) {
    llama_memory_t memory = llama_get_memory(ctx);
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        return *hybrid->get_mem_attn();
    }
    auto * cache = dynamic_cast<llama_kv_cache *>(memory);
    if (!cache) {
        fail(DW_ERR_UNSUPPORTED, "found a memory without one KV cache");
    }
    return *cache;
}

// Rows of a decode that never runs.
class rows_of_ubatch {
  public:
    rows_of_ubatch(int32_t n, int32_t n_pos, const int32_t * seq_ids, const int32_t * positions) :
        positions_(positions, positions + n * n_pos),
        sequences_(seq_ids, seq_ids + n) {
        for (llama_seq_id & each : sequences_) {
            lists_.push_back(&each);
        }
        ubatch.n_tokens = (uint32_t) n;
        ubatch.n_pos    = (uint32_t) n_pos;
        ubatch.pos      = positions_.data();
        ubatch.seq_id   = lists_.data();
    }

    llama_ubatch ubatch = {};

  private:
    std::vector<llama_pos>      positions_;
    std::vector<llama_seq_id>   sequences_;
    std::vector<llama_seq_id *> lists_;
};

} // namespace

dw_status dw_kq_masks(dw_engine * engine, int32_t n_rows, int32_t n_streams, int32_t n_pos, const int32_t * seq_ids,
                      const int32_t * positions, int32_t n_kv, float * masks, float * ours, bool * is_filled) {
    return with(engine, "dw_kq_masks", [&](auto & e) {
        require("dw_kq_masks", seq_ids, positions, masks, ours, is_filled);
        if (n_rows < 1 || n_streams < 1 || n_rows % n_streams != 0 || n_pos < 1 || n_kv < 1) {
            fail(DW_ERR_ARGUMENT,
                 "found %d rows of %d positions in %d streams, and %d cells; expected rows that streams share", n_rows,
                 n_pos, n_streams, n_kv);
        }
        llama_kv_cache &     cache = cache_of(e.sequence().context().get());
        const rows_of_ubatch rows(n_rows, n_pos, seq_ids, positions);
        ggml_context_ptr     ctx(ggml_init({ ggml_tensor_overhead(), nullptr, /*no_alloc*/ true }));
        ggml_tensor * mask = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F32, n_kv, n_rows / n_streams, 1, n_streams);
        ggml_backend_buffer_ptr buffer(
            ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_cpu_buffer_type()));
        float * const data = (float *) mask->data;
        const int64_t n    = ggml_nelements(mask);
        std::fill(data, data + n, 7.0f);
        *is_filled = fill_kq_mask(cache, *mask, rows.ubatch);
        std::copy(data, data + n, ours);
        const bool was       = cache.dw_fills_masks;
        cache.dw_fills_masks = false;
        std::fill(data, data + n, 7.0f);
        cache.set_input_kq_mask(mask, &rows.ubatch, /*causal_attn*/ true);
        cache.dw_fills_masks = was;
        std::copy(data, data + n, masks);
    });
}
