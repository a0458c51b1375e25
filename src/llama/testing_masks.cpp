// See testing_masks.h.

#include "llama/testing_masks.h"

#include "ggml-cpp.h"
#include "llama-batch.h"
#include "llama-cparams.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid.h"
#include "llama/kq_mask.h"
#include "llama/status.h"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace draftwood {

namespace {

constexpr int32_t n_rows_max = 1024;
constexpr float   untouched  = 7.0f;

llama_kv_cache & cache_of(llama_context * ctx) {
    llama_memory_t memory = llama_get_memory(ctx);
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        return *hybrid->get_mem_attn();
    }
    auto * cache = dynamic_cast<llama_kv_cache *>(memory);
    if (!cache) {
        fail(DW_ERR_UNSUPPORTED, "found a memory of another kind; expected one KV cache, with or without recurrent "
                                 "states: use a model without a sliding window");
    }
    return *cache;
}

void require_sequences(const llama_context * ctx, const int32_t * seq_ids, int32_t n) {
    const int32_t n_all = (int32_t) llama_n_seq_max(ctx);
    for (int32_t i = 0; i < n; ++i) {
        if (seq_ids[i] < 0 || seq_ids[i] >= n_all) {
            fail(DW_ERR_ARGUMENT, "found sequence %d; expected 0 to %d", seq_ids[i], n_all - 1);
        }
    }
}

void require_between(const char * what, int32_t n, int32_t least, int32_t most) {
    if (n < least || n > most) {
        fail(DW_ERR_ARGUMENT, "%s is %d; expected %d to %d", what, n, least, most);
    }
}

// Rows of a decode that never runs.
class rows_of_ubatch {
  public:
    rows_of_ubatch(int32_t n, int32_t n_pos, const int32_t * seq_ids, const int32_t * positions) :
        positions_(positions, positions + (ptrdiff_t) n * n_pos),
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

// A mask in host memory; all values begin as `untouched`.
struct mask_of_rows {
    ggml_context_ptr        ctx;
    ggml_tensor *           tensor;
    ggml_backend_buffer_ptr buffer;

    mask_of_rows(ggml_type type, int64_t n_kv, int64_t n_rows, int64_t n_streams) :
        ctx(ggml_init({ ggml_tensor_overhead(), nullptr, /*no_alloc*/ true })),
        tensor(ggml_new_tensor_4d(ctx.get(), type, n_kv, n_rows / n_streams, 1, n_streams)),
        buffer(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_cpu_buffer_type())) {
        if (!buffer) {
            fail(DW_ERR_MEMORY, "found no memory for a mask of %zu bytes", ggml_nbytes(tensor));
        }
        for (int64_t i = 0; i < ggml_nelements(tensor); ++i) {
            set(i, untouched);
        }
    }

    void copy(float * to) const {
        for (int64_t i = 0; i < ggml_nelements(tensor); ++i) {
            to[i] = tensor->type == GGML_TYPE_F16 ? ggml_fp16_to_fp32(((const ggml_fp16_t *) tensor->data)[i])
                                                  : ((const float *) tensor->data)[i];
        }
    }

  private:
    void set(int64_t i, float x) {
        if (tensor->type == GGML_TYPE_F16) {
            ((ggml_fp16_t *) tensor->data)[i] = ggml_fp32_to_fp16(x);
        } else {
            ((float *) tensor->data)[i] = x;
        }
    }
};

// Ours are left out while it lives.
struct llama_cpps_masks {
    explicit llama_cpps_masks(llama_kv_cache & of) :
        cache(of),
        was(of.dw_fills_masks) {
        cache.dw_fills_masks = false;
    }
    ~llama_cpps_masks() { cache.dw_fills_masks = was; }

    llama_kv_cache & cache;
    bool             was;
};

} // namespace

bool compare_kq_masks(llama_context * ctx, const mask_rows & of, float * masks, float * ours) {
    llama_kv_cache & cache = cache_of(ctx);
    require_between("n_rows", of.n_rows, 1, n_rows_max);
    require_between("n_pos", of.n_pos, 1, 4);
    require_between("n_kv", of.n_kv, 1, (int32_t) cache.get_size());
    require_between("n_streams", of.n_streams, 1, of.n_rows);
    if (of.n_rows % of.n_streams != 0) {
        fail(DW_ERR_ARGUMENT, "found %d rows in %d streams; expected as many in each", of.n_rows, of.n_streams);
    }
    require_sequences(ctx, of.seq_ids, of.n_rows);
    const rows_of_ubatch rows(of.n_rows, of.n_pos, of.seq_ids, of.positions);
    const ggml_type      type = of.f16 ? GGML_TYPE_F16 : GGML_TYPE_F32;
    const mask_of_rows   filled(type, of.n_kv, of.n_rows, of.n_streams);
    const mask_of_rows   looked_at(type, of.n_kv, of.n_rows, of.n_streams);
    const bool           is_filled = fill_kq_mask(cache, *filled.tensor, rows.ubatch, of.causal);
    filled.copy(ours);
    const llama_cpps_masks left_alone(cache);
    cache.set_input_kq_mask(looked_at.tensor, &rows.ubatch, of.causal);
    looked_at.copy(masks);
    return is_filled;
}

int32_t end_of_cells(llama_context * ctx) {
    return (int32_t) cache_of(ctx).get_cells(0).used_max_p1();
}

void remove_from_cache(llama_context * ctx, llama_seq_id seq, llama_pos pos) {
    require_sequences(ctx, &seq, 1);
    cache_of(ctx).dw_remove_from(seq, pos);
}

} // namespace draftwood
