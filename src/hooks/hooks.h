// The contract between llama.cpp's patched lines and draftwood: the only header that patched lines of libllama
// include. Those of ggml include hooks/backend-modules.h, llama/sched-inputs.h and ops/door. It declares what those
// lines call and nothing else; the bodies pass calls on to llama/, decode/ and experts/. Must not know: rounds,
// drafters.
//
// Every hook but dw_hook_mul_mat_id, dw_hook_kq_mask and dw_hook_pages takes the pointer that the patch
// `llama-cparams-hook-state` adds to llama_cparams. Unless an engine or a drafter is attached (llama/attachment.h) it
// is nullptr, and each hook returns at once: a build with draftwood switched off computes what a pristine build
// computes (tests/model/test_inert.py). Hooks never throw and never abort. Graph types of llama-graph.h appear by name
// only.

#pragma once

#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>
#include <vector>

struct dw_attachment;
struct llama_batch;
struct llama_batch_ext;
struct llama_ubatch;
struct llm_graph_context;
class llama_kv_cache;
class llama_kv_cells;
class llm_graph_result;

// llama_context::decode, first line of both: somebody decodes rows of these sequences.
void dw_hook_decode(dw_attachment * dw, const llama_batch & batch) noexcept;
void dw_hook_decode(dw_attachment * dw, const llama_batch_ext & batch) noexcept;

// llama_context::process_ubatch, before the last graph is looked at: put the one for n_rows rows in its place.
void dw_hook_graph(dw_attachment * dw, int64_t n_rows, bool has_outputs) noexcept;

// llama_context::process_ubatch, when a new graph was given its memory: false if too little is left to compute it.
bool dw_hook_fits(const dw_attachment * dw) noexcept;

// llama_context::process_ubatch, before the graph is computed: choose the CPU kernels for n_rows rows, fill inputs and
// mask. backend_cpu may be nullptr.
void dw_hook_compute(dw_attachment * dw, ggml_backend_t backend_cpu, int64_t n_rows, llm_graph_result & graph) noexcept;

// llama_kv_cache::set_input_kq_mask, for attention without a window: true if the mask is filled (llama/kq_mask.h).
// Called only while dw_fills_masks is set, which an attachment of the cache's context does.
bool dw_hook_kq_mask(const llama_kv_cache & cache, ggml_tensor * mask, const llama_ubatch & ubatch,
                     bool causal) noexcept;

// llama_kv_cache::find_slot, for the cells that sequences share: true if each row of the ubatch has one in `found`
// (llama/kv_pages.h). Called only while dw_has_pages is set, which an attachment of the cache's context does.
bool dw_hook_pages(const llama_kv_cells & cells, const llama_ubatch & ubatch, std::vector<uint32_t> & found) noexcept;

// llama_context::decode, for each of its results, before it is copied to the host: true if it stays where it is.
bool dw_hook_keeps(dw_attachment * dw, const ggml_tensor * result, float * host, size_t bytes) noexcept;

// llama_context::output_reorder, which all who ask for results of a decode pass: copy those that stayed.
void dw_hook_read(dw_attachment * dw) noexcept;

// llama_model::build_graph, behind the model's own nodes: add ours that work on its results.
void dw_hook_outputs(dw_attachment * dw, llm_graph_context & graph) noexcept;

// llama_context::state_write_data and state_seq_write_data, before the memory of sequence `seq` is written; -1: of all.
void dw_hook_state_write(dw_attachment * dw, int32_t seq) noexcept;

// llama_context::state_read_data and state_seq_read_data, before the memory of sequence `seq` is read; -1: of all.
void dw_hook_state_read(dw_attachment * dw, int32_t seq) noexcept;

// llm_graph_context::build_rs, first line: a verify copies no state. Returns nullptr if llama.cpp builds.
ggml_tensor * dw_hook_build_rs(const dw_attachment * dw, ggml_context * ctx, ggml_tensor * states, int64_t state_size,
                               int64_t n_seqs) noexcept;

// llm_build_delta_net_base::build_conv_state and build_recurrent_attn, first lines: see verify_graph in
// llama/decode_request.h. Both return nullptr if llama.cpp builds.
ggml_tensor * dw_hook_conv_state(const dw_attachment * dw, ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cell,
                                 ggml_tensor * x, int il) noexcept;
ggml_tensor * dw_hook_delta_net(const dw_attachment * dw, ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cell,
                                ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * g, ggml_tensor * beta,
                                int il) noexcept;

// llm_graph_context::build_lora_mm_id, in place of the product of chosen experts' weights with x: one that reads a
// pool's slots if the weights lie in a pool (experts/product.h), or one behind an op that reads them ahead if they lie
// in a mapped file and somebody asked for it (experts/readahead.h). watched: somebody sees each node's result. It needs
// no attachment.
ggml_tensor * dw_hook_mul_mat_id(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * weights, ggml_tensor * x,
                                 ggml_tensor * ids, bool watched) noexcept;

// llm_graph_context::build_attn_mha without flash attention, before the softmax and in place of the product with the
// values: see verify_graph.
ggml_tensor * dw_hook_attn_scores(const dw_attachment * dw, ggml_context * ctx, ggml_tensor * scores) noexcept;
ggml_tensor * dw_hook_attn_values(const dw_attachment * dw, ggml_context * ctx, ggml_tensor * values,
                                  ggml_tensor * weights) noexcept;
