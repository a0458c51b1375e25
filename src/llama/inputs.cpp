// See inputs.h.

#include "llama/inputs.h"

#include "ggml-impl.h"
#include "llama-context.h"
#include "llama-graph.h"
#include "llama/attachment.h"
#include "llama/graph_store.h"
#include "llama/sched-inputs.h"
#include "llama/tensor_bytes.h"

#include <algorithm>

namespace draftwood {

namespace {

// the inputs of the attention layers; nullptr: none with a KV cache
llm_graph_input_attn_kv * find_attention(const llm_graph_result & graph) {
    for (const auto & input : graph.inputs) {
        if (const auto * hybrid = dynamic_cast<const llm_graph_input_mem_hybrid *>(input.get())) {
            return hybrid->get_attn();
        }
        if (auto * plain = dynamic_cast<llm_graph_input_attn_kv *>(input.get())) {
            return plain;
        }
    }
    return nullptr;
}

// the input that a feed goes to; nullptr: the graph has none
ggml_tensor * find_input(const llm_graph_result & graph, row_feed::kind kind) {
    for (const auto & input : graph.inputs) {
        if (const auto * pairs = dynamic_cast<const llm_graph_input_embd_h *>(input.get())) {
            return kind == row_feed::token ? pairs->tokens : pairs->h;
        }
        if (const auto * plain = dynamic_cast<const llm_graph_input_embd *>(input.get())) {
            return kind == row_feed::token ? plain->tokens : plain->embd;
        }
    }
    return nullptr;
}

// The device can fetch it while the graph goes on. What is computed in host memory may be written over meanwhile.
bool can_be_fetched(ggml_backend_t backend, const ggml_tensor * input) {
    const ggml_tensor * root = input->view_src ? input->view_src : input;
    return (root->flags & GGML_TENSOR_FLAG_INPUT) != 0 && ggml_is_contiguous(input) &&
           is_pinned_for(backend, root->buffer);
}

// the first of an input's feeds behind `done` bytes of it; nullptr: none
const row_feed * next_feed(const std::vector<fed_input> & fed, const ggml_tensor * input, size_t done) {
    const row_feed * next = nullptr;
    for (const fed_input & each : fed) {
        const row_feed & feed = each.feed;
        if (each.input == input && feed.at + feed.bytes > done && (!next || feed.at < next->at)) {
            next = &feed;
        }
    }
    return next;
}

// What `copy` is made of: parts that a device has, and between them the host's.
void add_pieces(std::vector<dw::piece> & to, const std::vector<fed_input> & fed, const ggml_tensor * input,
                ggml_tensor * copy) {
    const auto add = [&](size_t at, const void * from, size_t n_bytes) {
        if (n_bytes > 0) {
            to.push_back({ (char *) copy->data + at, from, n_bytes });
        }
    };
    const char * const here = (const char *) input->data;
    size_t             done = 0;
    while (const row_feed * feed = next_feed(fed, input, done)) {
        const size_t at = std::max(feed->at, done); // the first of two that overlap counts
        add(done, here + done, at - done);
        add(at, (const char *) feed->from->data + feed->offset + (at - feed->at), feed->at + feed->bytes - at);
        done = feed->at + feed->bytes;
    }
    add(done, here + done, ggml_nbytes(copy) - done);
}

// Keeps what is to be copied until the last input, and copies all of it then.
bool copy_input(void * user, ggml_backend_t backend, const ggml_tensor * input, ggml_tensor * copy, bool is_last) {
    attachment &             attached = *static_cast<attachment *>(user);
    std::vector<dw::piece> & pieces   = attached.pieces;
    const bool               is_ours  = can_be_fetched(backend, input);
    if (is_ours) {
        add_pieces(pieces, attached.outputs.fed, input, copy);
    }
    if (is_last && !pieces.empty()) {
        attached.copies(backend, pieces.data(), (int) pieces.size());
        attached.graphs->copied(backend);
        pieces.clear();
    }
    return is_ours;
}

} // namespace

bool find_rows(const llm_graph_result & graph, int64_t n_rows, placed_rows & rows) {
    const llm_graph_input_attn_kv * attn = find_attention(graph);
    if (attn) {
        rows = { n_rows, (const int64_t *) attn->self_k_idxs->data, attn->self_kq_mask };
    }
    return attn != nullptr;
}

namespace {

// Whether the request's feeds follow each other and fill all rows without a token.
bool are_rows_fed(const attachment & attached, const llm_graph_result & graph) {
    const ggml_tensor * rows = find_input(graph, row_feed::hidden);
    size_t              done = 0;
    for (const row_feed & feed : attached.request->feeds) {
        if (feed.input == row_feed::hidden && feed.at != done) {
            return false;
        }
        done += feed.input == row_feed::hidden ? feed.bytes : 0;
    }
    return !rows || done == ggml_nbytes(rows);
}

} // namespace

// What can go straight to the device goes with the input's copy (copy_input), the rest into the input now.
bool fill_inputs(attachment & attached, const llm_graph_result & graph) {
    copy_inputs_async(attached, attached.request && attached.async_inputs);
    attached.outputs.fed.clear();
    if (!attached.request) {
        return true;
    }
    if (attached.rows_are_fed && !are_rows_fed(attached, graph)) {
        return false;
    }
    for (const row_feed & feed : attached.request->feeds) {
        ggml_tensor * input = find_input(graph, feed.input);
        if (!input || feed.at + feed.bytes > ggml_nbytes(input)) {
            return false;
        }
        if (attached.async_inputs && feed.same_device && is_pinned_for(feed.writer, input->buffer)) {
            attached.outputs.fed.push_back({ feed, input });
        } else {
            ggml_backend_synchronize(feed.writer);
            ggml_backend_tensor_get(feed.from, (char *) input->data + feed.at, feed.offset, feed.bytes);
        }
    }
    return true;
}

void leave_rows_to_feeds(llm_graph_result & graph) {
    for (const auto & input : graph.inputs) {
        if (auto * rows = dynamic_cast<llm_graph_input_embd *>(input.get())) {
            rows->dw_is_fed = true;
        }
    }
}

void leave_out_unread(const llm_graph_result & graph, const ggml_cgraph * nodes) {
    llm_graph_input_attn_kv * attn = find_attention(graph);
    if (!attn) {
        return;
    }
    const auto reads = [](const ggml_tensor * node, const ggml_tensor * input) {
        return std::find(std::begin(node->src), std::end(node->src), input) != std::end(node->src);
    };
    for (ggml_tensor ** matrix : { &attn->self_k_rot, &attn->self_v_rot }) {
        const auto is_reader = [&](const ggml_tensor * node) { return reads(node, *matrix); };
        if (*matrix && std::none_of(nodes->nodes, nodes->nodes + nodes->n_nodes, is_reader)) {
            *matrix = nullptr;
        }
    }
}

void copy_inputs_async(attachment & attached, bool async) noexcept {
    attached.pieces.clear(); // of a decode that failed
    *dw_sched_inputs_of(attached.ctx->get_sched()) = { async ? copy_input : nullptr, async ? &attached : nullptr };
}

} // namespace draftwood
