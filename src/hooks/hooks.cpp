// The hooks' bodies: see hooks.h for who calls them and when.

#include "hooks.h"

#include "ggml-cpu.h"
#include "graphs.h"
#include "llama-context.h"

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

} // namespace

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

void dw_hook_decode(dw_state * dw) noexcept {
    if (dw && dw->flush) {
        dw->flush(dw->user, /*decodes*/ true);
    }
}

void dw_hook_graph(dw_state * dw, int64_t n_rows, bool has_outputs, llm_graph_result_ptr & result,
                   llm_graph_result *& reusable, ggml_backend_sched_ptr & sched) noexcept {
    if (!dw || !dw->graphs) {
        return;
    }
    try {
        if (has_outputs) {
            dw->graphs->select(n_rows, dw->verify ? dw->verify->variant() : 0, result, reusable, sched);
        } else {
            dw->graphs->restore(); // a part of a prompt: the context's own graph
        }
    } catch (const std::exception &) {
        reusable = nullptr; // no memory for another graph: llama.cpp rebuilds, as it always did
        dw->graphs->distrust();
    }
}

void dw_hook_compute(dw_state * dw, ggml_backend_t backend_cpu, int64_t n_rows, llm_graph_result & graph) noexcept {
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
