// The experts of a model that lie partly in device memory: which layer's are where, and what was counted.
//
// A pool is made before its model, which is loaded into its buffer type (slot_buffer.h). The layers enter when a graph
// is built with one of them for the first time: slots are filled with the experts that the heat says, else with the
// first. Tensors are parts of one layer if their names begin with the same "blk.N.". The pool outlives its model.
// Graphs of several contexts may use it; their decodes must not overlap. Must not know: rounds, drafters, contexts.
// Test: tests/model/test_expert_pool.py.

#pragma once

#include "experts/slot_buffer.h"
#include "ops/expert-slots/expert-slots.h"

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace draftwood {

class expert_pool {
  public:
    using policy   = dw::expert_slots::policy;
    using counters = dw::expert_slots::counters;

    // n_slots of each layer, at least 0. has_stage: prompts' experts are copied ahead, where the device can; it takes
    // the bytes of two layers' experts. guesses: experts are fetched before their router has chosen (guess.h). Throws
    // failure with DW_ERR_UNSUPPORTED.
    expert_pool(ggml_backend_dev_t device, int32_t n_slots, policy victims, bool has_stage, bool guesses);
    ~expert_pool();
    expert_pool(const expert_pool &)             = delete;
    expert_pool & operator=(const expert_pool &) = delete;

    // the one that holds `tensor`; nullptr: none
    static expert_pool * of(const ggml_tensor * tensor) noexcept;

    slot_buffer_type &       buffer_type() { return type_; }
    const slot_buffer_type & buffer_type() const { return type_; }

    // A part of a layer. nullptr: the tensor cannot be one, or there was no memory for the layer's table; its experts
    // are read in place. Both live until the model goes.
    struct place {
        const dw::expert_slots::layer * layer;
        const dw::expert_slots::part *  part;
    };
    place place_of(const ggml_tensor * tensor);

    // Heat u32[n] of a model's layer: how its experts were used before. Ignored for layers that have entered.
    void set_heat(int32_t il, std::vector<uint32_t> heat);

    // What is known of a layer that has entered.
    struct seen {
        int32_t               il; // as the tensors' names say
        int32_t               n_slots;
        int64_t               expert_bytes; // of one expert, all parts
        counters              counted;
        std::vector<uint32_t> heat;    // u32[n_experts]
        std::vector<int32_t>  slot_of; // i32[n_experts], -1: on the host alone
    };

    // Reads the device; waits for nothing that runs there. Throws failure with DW_ERR_INTERNAL.
    std::vector<seen>   look() const;
    std::optional<seen> look(int32_t il) const; // nothing: no such layer has entered

    void model_goes() noexcept; // its tensors and graphs are gone or about to go

    // The layer's copies run beside other work in the graphs built from now on.
    void    computes_beside(const dw::expert_slots::layer & of);
    int32_t n_beside() const; // such layers

    bool    guesses() const { return guesses_; }
    int64_t stage_bytes() const; // that the stage takes on the device; 0: there is none

  private:
    struct held {
        dw::expert_slots::layer          layer;
        std::vector<const ggml_tensor *> tensors; // by part
        bool                             computes_beside = false;
    };

    seen                  read(int32_t il, const held & layer) const;
    void                  enter();
    std::unique_ptr<held> make_layer(int32_t il);
    void                  make_stage();
    bool                  map_stage();
    void                  free_stage() noexcept;
    bool                  fill_slots(const dw::expert_slots::layer & of, const dw::expert_slots::table & first) const;

    slot_buffer_type                         type_;
    policy                                   victims_;
    std::map<int32_t, std::vector<uint32_t>> heat_;   // by number
    std::map<int32_t, std::unique_ptr<held>> layers_; // by number; those that cannot be one are left out
    mutable std::mutex                       mutex_;

    dw::expert_slots::copy_streams * copies_ = nullptr; // of a pool that guesses, on a device with queues

    bool                      guesses_;
    bool                      has_stage_;
    dw::expert_slots::stage * stage_ = nullptr;
    std::vector<void *>       staged_memory_;
    int64_t                   stage_bytes_ = 0;
    bool                      entered_     = false;
};

} // namespace draftwood
