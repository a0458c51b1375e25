// What one decode is asked to do beside llama.cpp's own work. Whoever decodes builds a request, hands it over for that
// decode (llama/decode.h), and drops it. Must not know: rounds, drafters, samplers.
// Test: tests/model/engine/test_trees.py, test_tree_aborts.py (a failed decode leaves nothing behind).

#pragma once

#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace draftwood {

class memory_fork;

// Where the rows of a decode were put. Known after the graph's inputs are set and before it is computed.
struct placed_rows {
    int64_t         n;       // rows
    const int64_t * cells;   // i64[n], counted through all streams of the KV cache
    ggml_tensor *   kq_mask; // f32 or f16 [n_kv, n / n_streams, 1, n_streams] in host memory, 0 or -inf
};

// Decides which rows of a decode see each other, where the order of their positions does not say it.
class row_mask {
  public:
    virtual ~row_mask() = default;

    virtual void placed(const placed_rows & rows) noexcept = 0;
};

// Which graph of a number of rows a verify builds.
enum class verify_kind : int32_t {
    none  = 0, // llama.cpp's own graph
    chain = 1,
    tree  = 2,
};

// Builds parts of a verify's graph in place of llama.cpp. Recurrent layers read the state and do not write it, since
// the accepted path is known only afterwards. Attention without flash attention rounds as in plain decoding.
// Sizes: S head size, H heads, N rows a sequence. Functions return nodes in `ctx`, which owns them.
class verify_graph : public row_mask {
  public:
    virtual verify_kind kind() const noexcept = 0; // none is no answer

    // conv inputs x [C, N, n_seqs] of layer il -> what ggml_ssm_conv takes; cells i32[n_seqs] are the sequences' states
    virtual ggml_tensor * conv_input(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cells, ggml_tensor * x,
                                     int il) = 0;

    // the layer's output [S, H, N, n_seqs]; arguments as in ggml_gated_delta_net
    virtual ggml_tensor * delta_net(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cells, ggml_tensor * q,
                                    ggml_tensor * k, ggml_tensor * v, ggml_tensor * g, ggml_tensor * beta, int il) = 0;

    // scores [n_kv, rows, H, n_streams] of keys and queries, before mask and softmax -> the same, arranged
    virtual ggml_tensor * attn_scores(ggml_context * ctx, ggml_tensor * scores) = 0;

    // values [n_kv, S, Hkv, n_streams] weighed by weights of the scores' shape -> as ggml_mul_mat gives it
    virtual ggml_tensor * attn_values(ggml_context * ctx, ggml_tensor * values, ggml_tensor * weights) = 0;
};

// Bytes of a decode's input that lie in another tensor, mostly on a device. The host's copy of them means nothing.
struct row_feed {
    enum kind { token, hidden } input; // i32[rows], f32[n_embd, rows]
    size_t              at;            // of the input, bytes
    const ggml_tensor * from;          // valid until the decode has run
    size_t              offset, bytes; // of `from`
    ggml_backend_t      writer;        // writes `from` in its stream, and reads it if `same_device`
    bool                same_device;   // all readers of the input are on the device of `from`
};

// Rows of a decode that share a graph, and with it one ubatch.
struct decode_part {
    int32_t        n_rows;
    verify_graph * verify; // leaves the recurrent state alone, and masks its rows; nullptr: llama.cpp's own graph
};

struct decode_request {
    std::vector<decode_part> parts;               // in the batch's order; none: llama.cpp splits the batch
    row_mask *               mask      = nullptr; // of what is no verify; nullptr: llama.cpp's own mask
    int32_t                  slot      = 0; // one of several graphs of a size; two that alternate can both be queued
    int32_t                  n_threads = 0; // of the CPU for a batch of several rows; 0: the context's n_threads_batch
    std::vector<row_feed>    feeds;
    // Of a step that is queued behind the newest decode. That one's graph is still read: this one has another slot.
    memory_fork * fork = nullptr;
};

} // namespace draftwood
