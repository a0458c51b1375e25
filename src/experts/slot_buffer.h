// A ggml buffer type whose tensors are parts of expert-slots.h: all experts in host memory, and slots in device memory
// behind them. llama.cpp loads a model's expert tensors into it through tensor_buft_overrides. A tensor in it is an
// ordinary one that lies in host memory; only experts/product.h knows of the slots. Slots have tensors of three
// dimensions whose name ends with "_exps.weight"; others that llama.cpp puts here, such as a LoRA adapter's, lie on the
// host alone. A ggml-cuda built with asserts refuses any type but its own. Must not know: layers, contexts, what is
// resident. Test: tests/model/test_expert_pool.py.

#pragma once

#include "ggml-backend-impl.h"
#include "ops/expert-slots/slot-memory.h"

#include <cstdint>
#include <string>
#include <vector>

namespace draftwood {

class expert_pool;

// Where the experts and the slots of a tensor [n, m, E] lie, in bytes from its data.
struct slot_layout {
    int64_t stride;       // of an expert
    int32_t n_slots;      // as the pool has them, at most E
    int32_t first_slot;   // index of slot 0 in experts: those before it are on the host
    size_t  host_bytes;   // pages
    size_t  device_bytes; // pages behind them; the last one ends with zeros, where kernels read over the end
    int32_t first_staged; // index of expert 0 in the stage
    size_t  staged_bytes; // pages behind the slots, without memory until map_staged()
};

class slot_buffer_type {
  public:
    // device: a CPU or a CUDA card; n_slots >= 0 of a tensor; has_stage: whether tensors have addresses for a stage.
    // Throws failure with DW_ERR_UNSUPPORTED.
    slot_buffer_type(ggml_backend_dev_t device, int32_t n_slots, bool has_stage);
    slot_buffer_type(const slot_buffer_type &)             = delete;
    slot_buffer_type & operator=(const slot_buffer_type &) = delete;

    // the type whose buffer holds `tensor`; nullptr: another one's, or none's
    static slot_buffer_type * of(const ggml_tensor * tensor) noexcept;

    // for llama_model_tensor_buft_override; models in it must be freed before this
    ggml_backend_buffer_type_t get() { return &type_; }

    slot_layout layout(const ggml_tensor * tensor) const;

    ggml_backend_dev_t      device() const { return type_.device; }
    int                     device_number() const { return context_.device; }
    const dw::slot_memory & memory() const { return memory_; }

    // the tensors in it so far, and the bytes that they have
    const std::vector<ggml_tensor *> & tensors() const { return tensors_; }
    int64_t                            host_bytes() const { return host_bytes_; }
    int64_t                            device_bytes() const { return device_bytes_; }

    // What a load found no memory for: bytes of a tensor's part, on the host or on the device.
    struct refusal {
        int64_t n_bytes = 0;
        bool    on_host = false;
    };
    const refusal & refused() const { return refused_; }
    void            limit_host(int64_t n_bytes) { host_limit_ = n_bytes; } // of all tensors; for tests

    void mapped(ggml_tensor * tensor); // by a buffer of this type
    // Whether so many bytes may be mapped, and that they were not.
    bool may_map_host(size_t n_bytes) const { return host_bytes_ + (int64_t) n_bytes <= host_limit_; }
    void refuse(size_t n_bytes, bool on_host) { refused_ = { (int64_t) n_bytes, on_host }; }
    void freed(const char * base, size_t n_bytes); // a buffer with what lay in it

    // Map shared memory where the tensor's stage is; its buffer unmaps it. false: it cannot be mapped.
    bool map_staged(const ggml_tensor * tensor, void * memory);

    expert_pool * owner = nullptr; // hears when a model goes

  private:
    // ggml-cuda reads the context of a buffer type as its own, which is a device and a name.
    struct type_context {
        int                device;
        std::string        name;
        slot_buffer_type * self;
    };

    static slot_buffer_type &    of(ggml_backend_buffer_type_t type) { return *((type_context *) type->context)->self; }
    static const char *          name(ggml_backend_buffer_type_t type);
    static size_t                alignment(ggml_backend_buffer_type_t type);
    static size_t                alloc_size(ggml_backend_buffer_type_t type, const ggml_tensor * tensor);
    static ggml_backend_buffer_t allocate(ggml_backend_buffer_type_t type, size_t n_bytes);

    type_context               context_;
    const dw::slot_memory &    memory_;
    int32_t                    n_slots_;
    bool                       has_stage_;
    ggml_backend_buffer_type   type_;
    std::vector<ggml_tensor *> tensors_;
    std::vector<const char *>  data_; // theirs: they may be gone before their memory
    int64_t                    host_bytes_   = 0;
    int64_t                    device_bytes_ = 0;
    int64_t                    host_limit_   = INT64_MAX;
    refusal                    refused_;
};

} // namespace draftwood
