// draftwood's public C API for experts that do not fit: a pool beside a card's memory, and reading ahead where a model
// is larger than the machine's memory. Conventions: draftwood.h. Python signatures: python/draftwood/engine/_capi.py.

#pragma once

#include "draftwood.h"

#ifdef __cplusplus
extern "C" {
#endif

// experts of a layer
#define DW_MAX_EXPERTS 1024

// Experts beyond a card's memory
//
// A pool holds all experts of a model in host memory, and of each layer as many as it has slots in the memory of a
// device, where the layer's products read them. A missing expert is copied into a slot inside the step that needs it.
// Make the pool, name its buffer type for the expert tensors in llama_model_params.tensor_buft_overrides, load the
// model. Free the pool after the model. It holds one model at a time. Two contexts on one model must not decode at the
// same time: synchronise one before the other decodes.
// On a CPU results do not depend on the slots. On CUDA those of up to 8 rows do not; the rounding of larger batches
// depends on the number of slots. Test: tests/model/test_expert_pool.py.

typedef struct dw_expert_pool dw_expert_pool;

// Which expert gives its slot to a missing one. Those of the step that runs never do.
typedef enum dw_expert_policy {
    DW_EXPERTS_FREQUENCY = 0, // the one used least of late: counts halve every 64 steps
    DW_EXPERTS_LRU       = 1, // the one used longest ago
} dw_expert_policy;

typedef struct dw_expert_params {
    uint32_t     struct_size; // sizeof(dw_expert_params), set by dw_expert_params_init
    int32_t      n_slots;     // of each layer; 0: experts are read from host memory
    int32_t      policy;      // dw_expert_policy
    int32_t      stage; // 1: copy the experts of prompts ahead, where the device can; takes two layers' experts there
    int32_t      guess; // 1: fetch a layer's experts while the layer before it computes, by what its input says of them
    int32_t      reserved;
    const char * device; // ggml's name of it: "CUDA0"; "CPU" keeps slots in plain memory, as tests do
} dw_expert_params;

// Sums over layers since the pool was made. A step's experts are counted once a layer, however many rows chose them.
typedef struct dw_expert_stats {
    uint32_t struct_size;
    int32_t  n_layers; // that entered: a graph was made with them
    int32_t  n_experts;
    int32_t  n_slots;
    int64_t  n_steps;      // of one layer
    int64_t  n_hits;       // experts that were in a slot
    int64_t  n_misses;     // that were copied into one
    int64_t  n_in_place;   // that were read from host memory: in prompts, and where a step has more experts than slots
    int64_t  bytes_missed; // of misses, in_place and guessed
    int64_t  host_bytes;   // that the experts take in host memory
    int64_t  device_bytes; // that the slots take
    int64_t  stage_bytes;  // that the stage takes; 0: prompts read in place
    int32_t  n_beside;     // layers with work beside which copies run in a second queue
    int32_t  reserved;
    int64_t  n_guessed; // experts that were fetched before their router had chosen; bytes_missed has them
    int64_t  n_right;   // of these, that it then chose
    int64_t  n_late;    // waits for a copy that were given up: that expert was read from host memory
} dw_expert_stats;

typedef struct dw_expert_layer {
    uint32_t struct_size;
    int32_t  n_experts;
    int32_t  n_slots;
    int32_t  reserved;
    int64_t  expert_bytes; // of one expert
    int64_t  n_hits;
    int64_t  n_misses;
    int64_t  n_in_place;
    uint32_t heat[DW_MAX_EXPERTS];    // [expert] uses of late, in 1/256
    int32_t  slot_of[DW_MAX_EXPERTS]; // [expert] -1: in host memory alone
} dw_expert_layer;

DW_API void dw_expert_params_init(dw_expert_params * params);

// Errors: DW_ERR_ARGUMENT (no such device, a number out of range), DW_ERR_UNSUPPORTED (the device cannot read host
// memory through its own addresses).
DW_API dw_status dw_expert_pool_new(const dw_expert_params * params, dw_expert_pool ** pool);
DW_API void      dw_expert_pool_free(dw_expert_pool * pool);

// The ggml_backend_buffer_type_t for tensor_buft_overrides; the pool owns it. A model that finds too little memory for
// it fails to load, as with any other type.
DW_API void * dw_expert_pool_buffer_type(dw_expert_pool * pool);

// What a layer's experts were used before, u32[n_experts]: the most used ones fill its slots at the start. It counts
// for layers that have not entered. Errors: DW_ERR_ARGUMENT.
DW_API dw_status dw_expert_set_heat(dw_expert_pool * pool, int32_t il, const uint32_t * heat, int32_t n_experts);

// Why a model could not be loaded into the pool: bytes of a tensor's part that host or device memory was refused for;
// 0: it was not for that.
DW_API dw_status dw_expert_refused(const dw_expert_pool * pool, int64_t * n_bytes, bool * on_host);

// Read the device's counters, without waiting for what runs there.
// Errors: DW_ERR_ARGUMENT (il has no experts in the pool, or has not entered), DW_ERR_INTERNAL (the device failed).
DW_API dw_status dw_expert_get_stats(const dw_expert_pool * pool, dw_expert_stats * stats);
DW_API dw_status dw_expert_get_layer(const dw_expert_pool * pool, int32_t il, dw_expert_layer * layer);

// Experts beyond memory
//
// A model that is larger than memory lies in a mapped file, and the kernel reads the pages that products meet. With a
// dw_expert_readahead, an op behind each router asks for all pages of all chosen experts at once, in batches of up to
// 64 rows. Results do not change. It works on Linux, for experts that a CPU reads from a mapped file (use_mmap, in no
// pool). Make it behind the model and before its contexts decode. Free it when they decode no more and before the
// model. Test: tests/model/test_expert_readahead.py.

typedef struct dw_expert_readahead dw_expert_readahead;

// Sums over layers since it was made. A step's experts are counted once a layer, however many rows chose them.
typedef struct dw_readahead_stats {
    uint32_t struct_size;
    int32_t  n_layers;       // with experts in a mapped file
    int64_t  n_steps;        // of one layer
    int64_t  n_experts_used; // that steps chose
    int64_t  n_experts_read; // of these, with pages that were not in memory
    int64_t  bytes_read;     // such pages. Both 0 if the process neither owns the file nor may write it: Linux hides it
    int64_t  expert_bytes;   // all experts of these layers
} dw_readahead_stats;

// A model without such experts gives one with n_layers 0, which has no effect.
// Errors: DW_ERR_ARGUMENT (the model has one).
DW_API dw_status dw_expert_readahead_new(const struct llama_model * model, dw_expert_readahead ** readahead);
DW_API void      dw_expert_readahead_free(dw_expert_readahead * readahead);

// Errors: DW_ERR_ARGUMENT.
DW_API dw_status dw_expert_readahead_get_stats(const dw_expert_readahead * readahead, dw_readahead_stats * stats);

#ifdef __cplusplus
}
#endif
