// How the inputs of a graph are filled: rows of a mask, tokens and hidden states that lie on a device, copies that do
// not wait for it. Must not know: rounds, drafters, samplers.
// Test: tests/model/engine/test_trees.py, tests/gpu/test_same_text.py.

#pragma once

#include "llama/decode_request.h"

struct dw_attachment;
struct ggml_cgraph;
struct llama_context;
class llm_graph_result;

namespace draftwood {

// Where the n_rows rows of a graph's attention were put. Returns false if no layer has a KV cache.
bool find_rows(const llm_graph_result & graph, int64_t n_rows, placed_rows & rows);

// Fills the inputs that the running request feeds, and chooses how the scheduler copies inputs to their device.
// Returns false if a feed fits no input of the graph, whose results then mean nothing.
bool fill_inputs(dw_attachment & attached, const llm_graph_result & graph);

// llama.cpp copies no values of rows without tokens into this graph's input: fill_inputs() does.
void leave_rows_to_feeds(llm_graph_result & graph);

// The matrices of Walsh-Hadamard transforms that no node reads are not copied with each decode: a quantised KV cache
// has 256 KB of them, and fused layers transform by themselves.
void leave_out_unread(const llm_graph_result & graph, const ggml_cgraph * nodes);

// The scheduler in place copies inputs without waiting for their device, or as ggml does.
void copy_inputs_async(dw_attachment & attached, bool async) noexcept;

} // namespace draftwood
