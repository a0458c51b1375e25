// The hooks' bodies: see hooks.h for who calls them and when.

#include "hooks/hooks.h"

#include "ggml-cpu.h"
#include "hooks/sched-inputs.h"
#include "llama-context.h"
#include "llama/graph_store.h"
#include "ops/door/custom-op.h"
#include "ops/top-rows/top-rows.h"

#include <algorithm>
#include <cstring>
#include <exception>

namespace {

using set_use_ref_t = decltype(&ggml_backend_cpu_set_use_ref);

// Looked up through the registry, since the CPU backend may be a module of its own (GGML_BACKEND_DL).
set_use_ref_t find_set_use_ref(ggml_backend_t backend_cpu) {
    ggml_backend_dev_t dev = ggml_backend_get_device(backend_cpu);
    ggml_backend_reg_t reg = dev ? ggml_backend_dev_backend_reg(dev) : nullptr;
    return reg ? (set_use_ref_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_cpu_set_use_ref") : nullptr;
}

// the inputs of the attention layers; nullptr: none with a KV cache
const llm_graph_input_attn_kv * find_attention(const llm_graph_result & graph) {
    for (const auto & input : graph.inputs) {
        if (const auto * hybrid = dynamic_cast<const llm_graph_input_mem_hybrid *>(input.get())) {
            return hybrid->get_attn();
        }
        if (const auto * plain = dynamic_cast<const llm_graph_input_attn_kv *>(input.get())) {
            return plain;
        }
    }
    return nullptr;
}

// the input that a feed goes to; nullptr: the graph has none
ggml_tensor * find_input(const llm_graph_result & graph, dw_feed::kind kind) {
    for (const auto & input : graph.inputs) {
        if (const auto * pairs = dynamic_cast<const llm_graph_input_embd_h *>(input.get())) {
            return kind == dw_feed::token ? pairs->tokens : pairs->h;
        }
        if (const auto * plain = dynamic_cast<const llm_graph_input_embd *>(input.get())) {
            return kind == dw_feed::token ? plain->tokens : plain->embd;
        }
    }
    return nullptr;
}

// n_kv's step in the decode that this thread runs; 0: llama.cpp's
thread_local uint32_t kv_step = 0;

// pinned, so that the device of `backend` can fetch it on its own
bool is_pinned_for(ggml_backend_t backend, const ggml_tensor * t) {
    return t->buffer && ggml_backend_buffer_get_type(t->buffer) ==
                            ggml_backend_dev_host_buffer_type(ggml_backend_get_device(backend));
}

// What can go straight to the device goes with the input's copy (copy_input), the rest into the input now. Feeds are
// for drafters: one that fits no input costs the draft its quality, not the text.
void resolve_feeds(dw_state & dw, const llm_graph_result & graph) {
    dw.resolved.clear();
    for (const dw_feed & feed : dw.feeds) {
        ggml_tensor * input = find_input(graph, feed.input);
        if (!input || feed.at + feed.bytes > ggml_nbytes(input)) {
            continue;
        }
        if (dw.async_inputs && feed.stays && is_pinned_for(feed.writer, input)) {
            dw.resolved.push_back({ feed, input });
        } else {
            ggml_backend_synchronize(feed.writer);
            ggml_backend_tensor_get(feed.from, (char *) input->data + feed.at, feed.offset, feed.bytes);
        }
    }
}

// Into the device's stream. Not for what is computed in host memory: the next node may write over it meanwhile.
bool copy_input(void * user, ggml_backend_t backend, const ggml_tensor * input, ggml_tensor * copy) {
    dw_state &          dw   = *static_cast<dw_state *>(user);
    const ggml_tensor * root = input->view_src ? input->view_src : input;
    if ((root->flags & GGML_TENSOR_FLAG_INPUT) == 0 || !ggml_is_contiguous(input) || !is_pinned_for(backend, root)) {
        return false;
    }
    ggml_backend_tensor_set_async(backend, copy, input->data, 0, ggml_nbytes(copy));
    for (const dw_state::resolved_feed & each : dw.resolved) {
        if (each.input == input) {
            const ggml_tensor from = dw_part_of(each.feed.from, each.feed.offset, each.feed.bytes);
            ggml_tensor       to   = dw_part_of(copy, each.feed.at, each.feed.bytes);
            ggml_backend_tensor_copy_async(backend, backend, &from, &to);
        }
    }
    dw.graphs->copied(backend);
    return true;
}

} // namespace

ggml_tensor dw_part_of(const ggml_tensor * tensor, size_t offset, size_t bytes) noexcept {
    ggml_tensor part{};
    part.type   = GGML_TYPE_I8;
    part.buffer = tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
    part.data   = (char *) tensor->data + offset;
    part.ne[0]  = (int64_t) bytes;
    part.nb[0]  = 1;
    for (int i = 1; i < GGML_MAX_DIMS; ++i) {
        part.ne[i] = 1;
        part.nb[i] = bytes;
    }
    return part;
}

dw_state *& dw_state_of(llama_context * ctx) noexcept {
    // llama_context only offers its parameters read-only
    return const_cast<llama_cparams &>(ctx->get_cparams()).dw;
}

ggml_backend_t dw_cpu_backend(llama_context * ctx) noexcept {
    ggml_backend_sched_t sched = ctx->get_sched();
    for (int i = 0; sched && i < ggml_backend_sched_get_n_backends(sched); ++i) {
        ggml_backend_t     backend = ggml_backend_sched_get_backend(sched, i);
        ggml_backend_dev_t dev     = ggml_backend_get_device(backend);
        if (dev && ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU) {
            return backend;
        }
    }
    return nullptr;
}

void dw_use_stock_kernels(llama_context * ctx) noexcept {
    ggml_backend_t backend = dw_cpu_backend(ctx);
    if (set_use_ref_t set_use_ref = backend ? find_set_use_ref(backend) : nullptr) {
        set_use_ref(backend, false);
    }
}

void dw_copy_inputs_for(dw_state * dw) noexcept {
    dw_set_input_copier(dw && dw->async_inputs ? copy_input : nullptr, dw);
}

void dw_hook_decode(dw_state * dw) noexcept {
    kv_step = dw ? dw->kv_step : 0;
    if (!dw) {
        return;
    }
    if (dw->flush) {
        dw->flush(dw->user, /*decodes*/ true);
    }
    dw->kept_outputs.clear(); // nobody asked for them
    dw->n_ubatches = 0;
}

uint32_t dw_hook_kv_step(uint32_t step) noexcept {
    return std::max(kv_step, step);
}

bool dw_hook_keeps(dw_state * dw, const ggml_tensor * result, float * host, size_t bytes) noexcept {
    try {
        if (dw && dw->keeps) {
            dw->kept_outputs.push_back({ result, host, bytes });
        }
        return dw && dw->keeps;
    } catch (const std::exception &) {
        return false; // no memory to remember it
    }
}

void dw_hook_read(dw_state * dw) noexcept {
    if (!dw) {
        return;
    }
    for (const dw_state::kept & each : dw->kept_outputs) {
        ggml_backend_tensor_get(each.tensor, each.host, 0, each.bytes);
    }
    dw->kept_outputs.clear();
}

void dw_hook_outputs(dw_state * dw, llm_graph_context & graph) noexcept {
    if (!dw) {
        return;
    }
    dw->tops.erase(graph.gf);
    ggml_tensor * logits = graph.res->get_logits();
    if (!dw->top_rows || !logits || logits->ne[1] > dw_max_top_rows || logits->ne[0] < dw_n_top) {
        return;
    }
    ggml_tensor * top = dw::top_rows::build(graph.ctx0, logits, dw_n_top, *dw->top_rows);
    ggml_set_output(top);
    ggml_build_forward_expand(graph.gf, top);
    dw->tops[graph.gf] = top;
}

void dw_hook_graph(dw_state * dw, int64_t n_rows, bool has_outputs, llm_graph_result_ptr & result,
                   llm_graph_result *& reusable, ggml_backend_sched_ptr & sched) noexcept {
    if (!dw || !dw->graphs) {
        return;
    }
    if (!dw->kept_outputs.empty()) { // a decode of several ubatches: the next may compute over them
        ggml_backend_sched_synchronize(sched.get());
        dw_hook_read(dw);
    }
    try {
        const int32_t variant = dw->verify ? dw->verify->variant() : dw->variant;
        dw->graphs->select(has_outputs && dw->ours ? n_rows : 0, variant, dw->verify != nullptr, result, reusable,
                           sched);
    } catch (const std::exception &) {
        reusable = nullptr; // no memory for another graph: llama.cpp rebuilds, as it always did
        dw->graphs->distrust();
    }
}

bool dw_hook_fits(const dw_state * dw) noexcept {
    return !dw || !dw->graphs || dw->graphs->fits();
}

void dw_hook_compute(dw_state * dw, ggml_backend_t backend_cpu, int64_t n_rows, llm_graph_result & graph) noexcept {
    dw_copy_inputs_for(dw && dw->ours ? dw : nullptr); // who decodes takes it back
    if (dw) {
        dw->result = &graph;
        dw->n_ubatches++;
        if (dw->graphs) {
            dw->graphs->allocated();
        }
        const auto top = dw->tops.find(graph.get_gf());
        dw->top        = top == dw->tops.end() ? nullptr : top->second;
        resolve_feeds(*dw, graph);
    }
    if (dw && dw->mask) {
        if (const llm_graph_input_attn_kv * attn = find_attention(graph)) {
            dw->mask->placed({ n_rows, (const int64_t *) attn->self_k_idxs->data, attn->self_kq_mask });
        }
    }
    if (!dw || !backend_cpu) {
        return;
    }
    if (set_use_ref_t set_use_ref = find_set_use_ref(backend_cpu)) {
        const bool exact = n_rows <= dw->exact_rows;
        set_use_ref(backend_cpu, exact);
        dw->n_exact_batches += exact ? 1 : 0;
    }
}

void dw_hook_state_write(dw_state * dw) noexcept {
    if (dw && dw->flush) {
        dw->flush(dw->user, /*decodes*/ false);
    }
}

void dw_hook_state_read(dw_state * dw) noexcept {
    if (dw && dw->flush) {
        dw->flush(dw->user, /*decodes*/ false); // the state read may be another sequence's
    }
    if (dw && dw->replaced) {
        dw->replaced(dw->user);
    }
}

ggml_tensor * dw_hook_build_rs(const dw_state * dw, ggml_context * ctx, ggml_tensor * states, int64_t state_size,
                               int64_t n_seqs) noexcept {
    return dw && dw->verify ? ggml_view_2d(ctx, states, state_size, n_seqs, states->nb[1], 0) : nullptr;
}

ggml_tensor * dw_hook_conv_state(const dw_state * dw, ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cell,
                                 ggml_tensor * x, int il) noexcept {
    return dw && dw->verify ? dw->verify->conv_input(ctx, graph, cell, x, il) : nullptr;
}

ggml_tensor * dw_hook_delta_net(const dw_state * dw, ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cell,
                                ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * g, ggml_tensor * beta,
                                int il) noexcept {
    return dw && dw->verify ? dw->verify->delta_net(ctx, graph, cell, q, k, v, g, beta, il) : nullptr;
}

ggml_tensor * dw_hook_attn_scores(const dw_state * dw, ggml_context * ctx, ggml_tensor * scores) noexcept {
    return dw && dw->verify ? dw->verify->attn_scores(ctx, scores) : scores;
}

ggml_tensor * dw_hook_attn_values(const dw_state * dw, ggml_context * ctx, ggml_tensor * values,
                                  ggml_tensor * weights) noexcept {
    return dw && dw->verify ? dw->verify->attn_values(ctx, values, weights) : ggml_mul_mat(ctx, values, weights);
}
