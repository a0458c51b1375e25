// See attachment.h.

#include "llama/attachment.h"

#include "llama-context.h"
#include "llama-ext.h"
#include "llama-graph.h"
#include "llama/backends.h"
#include "llama/graph_store.h"
#include "llama/inputs.h"
#include "llama/memory.h"
#include "llama/memory_fork.h"
#include "llama/memory_writes.h"
#include "ops/door/custom-op.h"
#include "ops/top-rows/top-rows.h"

#include <exception>
#include <utility>

using namespace draftwood;

namespace {

// llama_context only offers its parameters read-only
dw_attachment *& slot_of(llama_context * ctx) {
    return const_cast<llama_cparams &>(ctx->get_cparams()).dw;
}

} // namespace

dw_attachment::dw_attachment(llama_context * target, int32_t n_exact_rows, context_listener * of_others,
                             std::shared_ptr<model_attachment> of_model) :
    ctx(target),
    exact_rows(n_exact_rows),
    listener(of_others),
    model(std::move(of_model)),
    graphs(std::make_unique<graph_store>(target, model->budget().graphs)),
    fuses_(n_exact_rows > 0 ? fuse_where::on_gpu : fuse_where::nowhere),
    n_layer_users_(target->get_cparams().embeddings_layer_inp.size()) {
    slot_of(ctx) = this;
    fill_masks(ctx, true);
    keep_in_pages(ctx, listener != nullptr); // no text depends on a drafter's
}

dw_attachment::~dw_attachment() {
    slot_of(ctx) = nullptr;
    if (ggml_backend_t cpu = cpu_backend(ctx)) {
        use_exact_kernels(cpu, false); // the choice of before_compute() would outlive us
    }
    set_kv_step(ctx, llama_kv_step);
    fill_masks(ctx, false);
    keep_in_pages(ctx, false);
}

dw_attachment * dw_attachment::of(const llama_context * ctx) noexcept {
    return ctx->get_cparams().dw;
}

void dw_attachment::tap_hidden(bool on) noexcept {
    n_hidden_users_ += on ? 1 : -1;
    llama_set_embeddings_nextn(ctx, n_hidden_users_ > 0, /*masked*/ false);
}

void dw_attachment::tap_layer(uint32_t il, bool on) noexcept {
    int32_t &  users = n_layer_users_[il];
    const bool was   = users > 0;
    users += on ? 1 : -1;
    if (was != (users > 0)) { // each call makes llama.cpp reserve its memory anew
        llama_set_embeddings_layer_inp(ctx, il, users > 0);
    }
}

void dw_attachment::keep_output_hidden() {
    llama_set_embeddings_nextn(ctx, true, /*masked*/ true);
}

void dw_attachment::set_kv_steps(uint32_t few_rows, uint32_t others) noexcept {
    few_rows_step_ = few_rows;
    step_          = others;
}

void dw_attachment::fuse(fuse_where where) noexcept {
    fuses_       = where;
    fused_rows   = INT32_MAX;
    passes_over_ = false;
    graphs->distrust();
}

void dw_attachment::fused(const part_counts & parts, int32_t max_rows, bool passes_over) noexcept {
    n_fused      = parts;
    passes_over_ = passes_over_ || passes_over;
    if (n_fused_parts() > 0) {
        fused_rows = max_rows;
    }
}

// A raw decode must not land behind rows that were never accepted, nor take its positions from them.
void dw_attachment::decode_begins(const sequence_set & into, int32_t n_rows) noexcept {
    if (listener) {
        listener->on_decode(into);
    }
    const uint32_t step = passes_over_ && n_rows <= fused_rows ? few_rows_step_ : step_;
    if (step != set_step_) {
        set_kv_step(ctx, step);
        set_step_ = step;
    }
    in_ubatch_ = false;   // of a decode that failed
    outputs.kept.clear(); // nobody asked for them
    outputs.n_ubatches = 0;
}

// Graphs are kept for requests; other decodes get the context's own.
void dw_attachment::select_graph(int64_t n_rows, bool has_outputs) noexcept {
    in_ubatch_ = true;
    try {
        if (!outputs.kept.empty()) { // a decode of several ubatches: the next may compute over them
            ggml_backend_sched_synchronize(ctx->get_sched());
            outputs.copy_kept();
        }
        const verify_graph * verify = verify_of(outputs.n_ubatches);
        const verify_kind    kind   = verify ? verify->kind() : verify_kind::none;
        const int32_t        part   = verify ? outputs.n_ubatches : 0;
        const int32_t        slot   = request ? request->slot : 0;
        memory_fork *        fork   = request ? request->fork : nullptr;
        if (fork) {
            fork->clear_nothing();
        }
        graphs->select({ kind, part, slot, has_outputs && request ? n_rows : 0 }, /*keeps_newest*/ fork != nullptr);
    } catch (const std::exception &) {
        graphs->distrust(); // no memory for another graph: llama.cpp rebuilds its own
    }
}

const ggml_tensor * dw_attachment::add_outputs(llm_graph_context & graph) noexcept {
    ggml_tensor * logits = graph.res->get_logits();
    try {
        forget_tails();
        tails_.erase(graph.gf);
        if (rows_are_fed) {
            leave_rows_to_feeds(*graph.res);
        }
        if (memory_alone && graph.n_outputs == 0) {
            keep_memory_writes(graph);
            return nullptr;
        }
        graph_tail & tail = tails_[graph.gf];
        tail.few_logits   = shorten_logits(graph, head);
        logits            = tail.few_logits ? tail.few_logits : logits;
        if (!top_rows || !logits || logits->ne[1] > dw_max_top_rows || logits->ne[0] < dw_n_top) {
            return logits;
        }
        ggml_tensor * tokens = tail.few_logits ? head.few_tokens : nullptr;
        tail.top             = dw::top_rows::build(graph.ctx0, logits, tokens, dw_n_top, *top_rows);
        ggml_set_output(tail.top);
        ggml_build_forward_expand(graph.gf, tail.top);
    } catch (const std::exception &) {
        // no memory to remember it: such rows are sampled from their logits
    }
    return logits;
}

// removes the entries of graphs that are gone
void dw_attachment::forget_tails() {
    for (auto it = tails_.begin(); it != tails_.end();) {
        it = graphs->holds(it->first) ? std::next(it) : tails_.erase(it);
    }
}

bool dw_attachment::graph_fits() const noexcept {
    return graphs->fits();
}

void dw_attachment::before_compute(ggml_backend_t backend_cpu, int64_t n_rows, llm_graph_result & graph) noexcept {
    in_ubatch_    = false;
    outputs.graph = &graph;
    outputs.n_ubatches++;
    graphs->allocated();
    const auto tail = tails_.find(graph.get_gf());
    outputs.tail    = tail == tails_.end() ? graph_tail{} : tail->second;
    try {
        outputs.is_fed = fill_inputs(*this, graph) && outputs.is_fed;
    } catch (const std::exception &) {
        outputs.is_fed = false; // no memory to remember an input
    }
    row_mask *  verify = verify_of(outputs.n_ubatches - 1);
    row_mask *  mask   = verify ? verify : request ? request->mask : nullptr;
    placed_rows rows{};
    if (mask && find_rows(graph, n_rows, rows)) {
        mask->placed(rows);
    }
    if (backend_cpu) {
        const bool exact = n_rows <= exact_rows;
        n_exact_batches += use_exact_kernels(backend_cpu, exact) && exact ? 1 : 0;
    }
}

bool dw_attachment::keeps(const ggml_tensor * result, float * host, size_t bytes) noexcept {
    try {
        if (keeps_outputs) {
            outputs.kept.push_back({ result, host, bytes });
        }
        return keeps_outputs;
    } catch (const std::exception &) {
        return false; // no memory to remember it
    }
}

void dw_attachment::state_is_written(llama_seq_id seq) noexcept {
    if (listener) {
        listener->on_save(sequence_set::of(seq));
    }
}

void dw_attachment::state_is_read(llama_seq_id seq) noexcept {
    if (listener) {
        listener->on_replace(sequence_set::of(seq));
    }
}
