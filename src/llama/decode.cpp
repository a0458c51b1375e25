// See decode.h.

#include "llama/decode.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama/context_members.h"
#include "llama/inputs.h"

namespace draftwood {

namespace {

// hands a request to the context for as long as it lives
class handed_over {
  public:
    handed_over(attachment & attached, const decode_request & request) :
        attached_(attached) {
        attached_.request            = &request;
        attached_.outputs.n_ubatches = 0; // llama.cpp may fail before the first hook
        attached_.outputs.is_fed     = true;
    }
    ~handed_over() {
        attached_.request = nullptr;
        copy_inputs_async(attached_, false); // graphs of llama.cpp's own use the scheduler too
    }
    handed_over(const handed_over &)             = delete;
    handed_over & operator=(const handed_over &) = delete;

  private:
    attachment & attached_;
};

// Batches run on so many threads while it lives. llama_set_n_threads would write a line into the log.
class threads_of_batches {
  public:
    threads_of_batches(llama_context * ctx, int32_t n_threads) :
        n_threads_(const_cast<llama_cparams &>(ctx->get_cparams()).n_threads_batch),
        before_(n_threads_) {
        if (n_threads > 0) {
            n_threads_ = n_threads;
        }
    }
    ~threads_of_batches() { n_threads_ = before_; }
    threads_of_batches(const threads_of_batches &)             = delete;
    threads_of_batches & operator=(const threads_of_batches &) = delete;

  private:
    int32_t &     n_threads_;
    const int32_t before_;
};

// llama.cpp splits the context's batches into these parts while it lives
class split_into {
  public:
    split_into(llama_context * ctx, const std::vector<decode_part> & parts) :
        rows_(dw_context_graph::batches(*ctx).dw_parts) {
        std::vector<int32_t> rows;
        for (size_t i = 0; i < parts.size(); ++i) {
            rows.insert(rows.end(), parts[i].n_rows, (int32_t) i);
        }
        rows_.swap(rows);
    }
    ~split_into() { rows_.clear(); }
    split_into(const split_into &)             = delete;
    split_into & operator=(const split_into &) = delete;

  private:
    std::vector<int32_t> & rows_;
};

} // namespace

int32_t decode(attachment & attached, const decode_request & request, row_batch & batch) {
    const handed_over        until_it_ends(attached, request);
    const threads_of_batches threads(attached.ctx, request.n_threads);
    const split_into         parts(attached.ctx, request.parts);
    const int32_t            rc = batch.decode();
    if (rc == 0 && !request.parts.empty() && attached.outputs.n_ubatches != (int32_t) request.parts.size()) {
        fail(DW_ERR_INTERNAL, "a decode in %zu parts took %d graphs", request.parts.size(),
             attached.outputs.n_ubatches);
    }
    if (rc == 0 && !attached.outputs.is_fed) {
        fail(DW_ERR_INTERNAL, "the graph has no input for what was to be copied there");
    }
    return rc;
}

void count_step(attachment & attached) noexcept {
    dw_context_graph::count_step(*attached.ctx);
}

void uncount_step(attachment & attached) noexcept {
    dw_context_graph::uncount_step(*attached.ctx);
}

void restore_one_row(attachment & attached) noexcept {
    dw_context_graph::restore_one_row(*attached.ctx);
}

double replay(attachment & attached, int32_t n_times) {
    if (attached.outputs.n_ubatches != 1) {
        fail(DW_ERR_UNSUPPORTED, "the newest decode took %d graphs; one that is run again has one",
             (int) attached.outputs.n_ubatches);
    }
    struct copies_back {
        attachment & attached;
        ~copies_back() { copy_inputs_async(attached, false); }
    } const until_it_ends{ attached };
    copy_inputs_async(attached, attached.async_inputs);
    ggml_backend_sched_t sched = attached.ctx->get_sched();
    llama_synchronize(attached.ctx);
    const int64_t start_us = ggml_time_us();
    for (int32_t i = 0; i < n_times; ++i) {
        if (ggml_backend_sched_graph_compute_async(sched, attached.outputs.graph->get_gf()) != GGML_STATUS_SUCCESS) {
            fail(DW_ERR_DECODE, "a replay of the newest decode's graph failed");
        }
    }
    ggml_backend_sched_synchronize(sched);
    return (double) (ggml_time_us() - start_us) / n_times;
}

} // namespace draftwood
