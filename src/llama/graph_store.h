// One graph and one scheduler per number of rows and variant. llama.cpp keeps a context's newest graph only, so a
// verify of another size than the last rebuilds and allocates it: half a plain step on a small model, and a new capture
// with CUDA graphs. Here the graphs of the last few sizes stay, each with the scheduler that allocated it.

#pragma once

#include "ggml-cpp.h"
#include "llama-graph.h"

#include <cstdint>
#include <map>
#include <memory>
#include <utility>

struct llama_context;

// Swaps a context's own (newest result, scheduler, "result may be reused") for those of another size. What is not
// in the context is owned here. Test: tests/model/test_graphs.py.
class dw_graph_store {
  public:
    explicit dw_graph_store(llama_context * ctx) :
        ctx_(ctx) {}
    // the context must still be there; a verify's graph in its own place works on what goes
    ~dw_graph_store() { forget_verifies(); }
    dw_graph_store(const dw_graph_store &)             = delete;
    dw_graph_store & operator=(const dw_graph_store &) = delete;

    // A decode of n_rows rows comes (0: part of a prompt, which takes the context's own graph), a verify or not, with a
    // graph of this variant (dw_verify_graph, dw_state; 0: llama.cpp's own). The three are llama_context's members, the
    // result that of batches with outputs. Where the last graph found no memory, all take turns in the context's own
    // place from now on, with the memory that llama.cpp set aside; if that is too little, it is free for others, too.
    void select(int64_t n_rows, int32_t variant, bool verifies, llm_graph_result_ptr & result,
                llm_graph_result *& reusable, ggml_backend_sched_ptr & sched);

    // The selected graph has its memory; if it is another than the context's own, does the device have some to spare
    // for what computes it? ggml-cuda ends the process where it has none.
    bool fits() const;
    // it is about to be computed
    void allocated() noexcept { is_allocated_ = true; }
    bool short_of_memory() const noexcept { return short_of_memory_ || !is_allocated_; }

    // An input of the selected graph is on its way to the device of `backend`: select() waits until it is there, before
    // the next one is written over it.
    void copied(ggml_backend_t backend);

    // hand the context its own ones back
    void restore();

    // drop the graphs of all variants but llama.cpp's own: what they are built on goes
    void forget_verifies();

    // no graph could be put in place: what the context builds now must not be reused as another
    void distrust() noexcept { distrusted_ = true; }

    // batches larger than a verify share the context's own graph
    static constexpr int64_t max_rows = 64;
    // graphs kept; the least recently used goes
    static constexpr size_t max_kept = 12;

  private:
    using shape = std::pair<int32_t, int64_t>; // variant, rows; 0, 0: the context's own
    struct event_deleter {
        void operator()(ggml_backend_event_t event) const { ggml_backend_event_free(event); }
    };
    struct slot {
        llm_graph_result_ptr   result;
        ggml_backend_sched_ptr sched;
        bool                   built     = false; // the scheduler holds this result's graph
        int64_t                last_used = 0;
    };

    void notice_changes();
    void mend();
    void enter_own(int32_t variant);
    void wait_for_copies();
    void swap_to(shape wanted);
    void drop_oldest();

    llama_context *                                                     ctx_;
    std::map<shape, slot>                                               slots_;
    std::map<shape, std::unique_ptr<ggml_backend_event, event_deleter>> copies_;    // of inputs, one device
    shape                                                               current_{}; // whose slot the context holds
    int64_t                                                             clock_    = 0;
    llm_graph_result_ptr *                                              result_   = nullptr;
    llm_graph_result **                                                 reusable_ = nullptr;
    ggml_backend_sched_ptr *                                            sched_    = nullptr;
    ggml_backend_sched_t seen_            = nullptr; // the scheduler left in the context; another one: it made its own
    bool                 distrusted_      = false;
    bool                 is_allocated_    = true;
    bool                 short_of_memory_ = false;
    int32_t              own_variant_     = 0; // of the graph in the context's own place
};
