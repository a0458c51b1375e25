// The hooks' bodies: see hooks.h for who calls them and when.

#include "hooks/hooks.h"

#include "decode/fused_layers.h"
#include "experts/product.h"
#include "experts/readahead.h"
#include "llama-graph.h"
#include "llama/attachment.h"
#include "llama/inputs.h"
#include "llama/kq_mask.h"
#include "llama/kv_pages.h"
#include "llama/sequence_set.h"

#include <exception>

using namespace draftwood;

static_assert(dw_attachment::n_ops == n_fused_ops && sizeof(dw_attachment::part_counts) == sizeof(fused_counts));

namespace {

verify_graph * verify_of(const dw_attachment * dw) {
    return dw ? dw->verify() : nullptr;
}

} // namespace

void dw_hook_decode(dw_attachment * dw, const llama_batch & batch) noexcept {
    if (dw) {
        dw->decode_begins(sequences_of(batch), batch.n_tokens);
    }
}

void dw_hook_decode(dw_attachment * dw, const llama_batch_ext & batch) noexcept {
    if (dw) {
        dw->decode_begins(sequences_of(batch), n_rows_of(batch));
    }
}

bool dw_hook_kq_mask(const llama_kv_cache & cache, ggml_tensor * mask, const llama_ubatch & ubatch,
                     bool causal) noexcept {
    try {
        return fill_kq_mask(cache, *mask, ubatch, causal);
    } catch (const std::exception &) {
        return false; // no memory: llama.cpp looks at each cell
    }
}

bool dw_hook_pages(const llama_kv_cells & cells, const llama_ubatch & ubatch, std::vector<uint32_t> & found) noexcept {
    try {
        return find_in_pages(cells, ubatch, found);
    } catch (const std::exception &) {
        found.clear(); // no memory: llama.cpp takes the next free cells
        return false;
    }
}

bool dw_hook_keeps(dw_attachment * dw, const ggml_tensor * result, float * host, size_t bytes) noexcept {
    return dw && dw->keeps(result, host, bytes);
}

void dw_hook_read(dw_attachment * dw) noexcept {
    if (dw) {
        dw->outputs.copy_kept();
    }
}

void dw_hook_outputs(dw_attachment * dw, llm_graph_context & graph) noexcept {
    if (!dw) {
        return;
    }
    const ggml_tensor * logits = dw->add_outputs(graph);
    if (dw->fuses() == fuse_where::nowhere || graph.cparams.cb_eval) { // somebody looks at each node
        return;
    }
    dw->n_fused = {};
    try {
        const llm_graph_result & results = *graph.res;
        graph_results            kept{ logits, { results.t_embd_pooled, results.t_h_nextn } };
        if (graph.cparams.embeddings) { // else nobody reads them
            kept.kept.push_back(results.t_embd);
        }
        kept.kept.insert(kept.kept.end(), results.t_layer_inp.begin(), results.t_layer_inp.end());
        const fused_counts counts = fuse_layers(graph.ctx0, graph.gf, kept, dw->fuses() == fuse_where::everywhere);
        leave_out_unread(results, graph.gf);
        dw->fused(counts, max_fused_rows, /*passes_over*/ counts[fused_flash_attention] > 0);
    } catch (const std::exception &) {
        // no memory: llama.cpp's own nodes
    }
}

void dw_hook_graph(dw_attachment * dw, int64_t n_rows, bool has_outputs) noexcept {
    if (dw) {
        dw->select_graph(n_rows, has_outputs);
    }
}

bool dw_hook_fits(const dw_attachment * dw) noexcept {
    return !dw || dw->graph_fits();
}

void dw_hook_compute(dw_attachment * dw, ggml_backend_t backend_cpu, int64_t n_rows,
                     llm_graph_result & graph) noexcept {
    if (dw) {
        dw->before_compute(backend_cpu, n_rows, graph);
    }
}

void dw_hook_state_write(dw_attachment * dw, int32_t seq) noexcept {
    if (dw) {
        dw->state_is_written(seq);
    }
}

void dw_hook_state_read(dw_attachment * dw, int32_t seq) noexcept {
    if (dw) {
        dw->state_is_read(seq);
    }
}

ggml_tensor * dw_hook_build_rs(const dw_attachment * dw, ggml_context * ctx, ggml_tensor * states, int64_t state_size,
                               int64_t n_seqs) noexcept {
    return verify_of(dw) ? ggml_view_2d(ctx, states, state_size, n_seqs, states->nb[1], 0) : nullptr;
}

ggml_tensor * dw_hook_conv_state(const dw_attachment * dw, ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cell,
                                 ggml_tensor * x, int il) noexcept {
    verify_graph * verify = verify_of(dw);
    return verify ? verify->conv_input(ctx, graph, cell, x, il) : nullptr;
}

ggml_tensor * dw_hook_delta_net(const dw_attachment * dw, ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cell,
                                ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * g, ggml_tensor * beta,
                                int il) noexcept {
    verify_graph * verify = verify_of(dw);
    return verify ? verify->delta_net(ctx, graph, cell, q, k, v, g, beta, il) : nullptr;
}

ggml_tensor * dw_hook_attn_scores(const dw_attachment * dw, ggml_context * ctx, ggml_tensor * scores) noexcept {
    verify_graph * verify = verify_of(dw);
    return verify ? verify->attn_scores(ctx, scores) : scores;
}

ggml_tensor * dw_hook_attn_values(const dw_attachment * dw, ggml_context * ctx, ggml_tensor * values,
                                  ggml_tensor * weights) noexcept {
    verify_graph * verify = verify_of(dw);
    return verify ? verify->attn_values(ctx, values, weights) : ggml_mul_mat(ctx, values, weights);
}

ggml_tensor * dw_hook_mul_mat_id(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * weights, ggml_tensor * x,
                                 ggml_tensor * ids, bool watched) noexcept {
    ggml_tensor * product = nullptr;
    ggml_tensor * chosen  = ids;
    try {
        product = pooled_product(ctx, graph, weights, x, ids, watched);
        if (!product) {
            chosen = read_ahead(ctx, graph, weights, ids);
        }
    } catch (const std::exception &) {
        // no memory for the layer's table, or for a node: its experts are read from where they lie
    }
    return product ? product : ggml_mul_mat_id(ctx, weights, x, chosen);
}
