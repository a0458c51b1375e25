// One graph and one scheduler per shape of decode. llama.cpp keeps a context's newest graph only, so a verify of
// another size than the last rebuilds and allocates it: half a plain step on a small model, and a new capture with CUDA
// graphs. Here the graphs of the last few shapes stay, each with the scheduler that allocated it. Must not know:
// rounds, drafters, what a verify's graph computes. Test: tests/model/test_graphs.py.

#pragma once

#include "ggml-cpp.h"
#include "llama-graph.h"
#include "llama/decode_request.h"
#include "llama/device_budget.h"

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>

struct llama_context;

namespace draftwood {

// What tells two graphs of a context apart. All zero: the context's own place.
struct graph_shape {
    verify_kind verify = verify_kind::none;
    int32_t     part   = 0; // index of the decode_part that a verify is
    int32_t     slot   = 0; // decode_request::slot
    int64_t     n_rows = 0; // 0: part of a prompt, or somebody else's decode

    bool operator<(const graph_shape & other) const {
        return std::tie(verify, part, slot, n_rows) < std::tie(other.verify, other.part, other.slot, other.n_rows);
    }
    bool operator==(const graph_shape & other) const { return !(*this < other) && !(other < *this); }
};

// Swaps a context's own newest graph, its scheduler and "the graph may be reused" for those of another shape. What is
// not in the context is owned here. The context's members are looked up in each call: no address of them is kept.
class graph_store {
  public:
    // Counts its bytes in `share`; both must outlive it.
    graph_store(llama_context * ctx, budget_share & share) :
        ctx_(ctx),
        share_(share) {}
    // Gives the context its own graph back, unless that works on what a verify built.
    ~graph_store();
    graph_store(const graph_store &)             = delete;
    graph_store & operator=(const graph_store &) = delete;

    // A decode of this shape comes. If the last graph found no memory, or tensors are split over devices, all take
    // turns in the context's own place, with the memory that llama.cpp set aside. A decode whose graph does not fit
    // there either returns -2. keeps_newest: the graph that was selected before is still read. Throws std::bad_alloc.
    void select(const graph_shape & wanted, bool keeps_newest);

    // false: something made llama.cpp plan its graphs anew, an adapter for one; the next decode will
    bool is_current() const noexcept;
    // Makes a place for a decode of this shape, next to the newest one's. Returns false if it would have none of its
    // own. Throws std::bad_alloc; select() does not throw then.
    bool reserve(const graph_shape & wanted);
    // The graph selected last found no memory, and can be done without: its place goes, and the one before is selected.
    // No effect if that is the same; then its scheduler is replaced by the next select().
    void unselect();
    void drop(const graph_shape & shape);                        // its place, if there is one
    bool found_memory() const noexcept { return is_allocated_; } // of the graph that was selected last

    // Whether the devices have memory to spare for computing the selected graph, which has been allocated. ggml-cuda
    // ends the process if there is none. true in the context's own place, which llama.cpp has set aside.
    bool fits() const;
    // it is about to be computed
    void allocated() noexcept { is_allocated_ = true; }
    bool short_of_memory() const noexcept { return short_of_memory_ || !is_allocated_; }

    // An input of the selected graph is on its way to the device of `backend`: select() waits until it is there, before
    // the next one is written over it.
    void copied(ggml_backend_t backend);

    // Gives the context its own graph back and drops those of verifies: tensors that they read are about to go.
    void forget_verifies();

    // No graph could be put in place: llama.cpp builds one, and it must not be reused as another.
    void distrust() noexcept;

    // whether it is the context's newest graph or one that is kept
    bool holds(const ggml_cgraph * graph) const;

    // bytes of the graphs that are kept beside the context's own: compute buffers and tables of nodes
    size_t bytes() const;

    // batches larger than a verify share the context's own graph
    static constexpr int64_t max_rows = 64;
    // Graphs kept. Beyond it, or beyond the share's limit, the least recently used goes.
    static constexpr size_t max_kept = 12;

  private:
    struct slot {
        llm_graph_result_ptr   result;
        ggml_backend_sched_ptr sched;
        ggml_backend_event_ptr copied;            // its inputs are on their device; nullptr: they never went there
        bool                   built     = false; // the scheduler holds this result's graph
        int64_t                last_used = 0;
        size_t                 bytes     = 0; // known once it is no longer the selected one
    };

    void   notice_changes();
    void   mend();
    void   enter_own(const graph_shape & wanted);
    void   wait_for_copies();
    bool   has_own_place(const graph_shape & wanted) const;
    slot & place_of(const graph_shape & wanted);
    void   swap_to(const graph_shape & wanted, bool keeps_newest = false);
    bool   drop_oldest(bool keeps_newest);
    void   count_bytes();

    llama_context *             ctx_;
    budget_share &              share_;
    int64_t                     counted_ = 0; // bytes of ours in it
    std::map<graph_shape, slot> slots_;
    graph_shape                 current_{}; // whose slot the context holds
    graph_shape                 before_{};  // and held before select(); for unselect()
    ggml_backend_event_ptr      copied_;    // of that one
    int64_t                     clock_ = 0;

    ggml_backend_sched_t seen_ = nullptr; // the scheduler left in the context; another one: llama.cpp made its own
    bool                 distrusted_      = false;
    bool                 is_allocated_    = true;
    bool                 short_of_memory_ = false;
    graph_shape          own_verify_{}; // the verify whose graph is in the context's own place; all zero: none
};

} // namespace draftwood
