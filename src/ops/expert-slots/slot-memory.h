// Memory for experts on one kind of device: ranges of addresses, parts of which lie in host memory that the device
// reads, and parts in its own. Found by name in the registries of ggml-cpu and ggml-cuda (door/registry.h).
// Calls wait for what they do. They may be made on any thread, also while another one captures a CUDA graph in relaxed
// mode, as ggml-cuda does.
// Test: tests/model/test_expert_pool.py, tests/gpu/test_expert_pool_cuda.py.

#pragma once

#include <cstddef>

namespace dw {

namespace expert_slots {
struct stage;
struct copy_streams;
} // namespace expert_slots

constexpr const char * slot_memory_name = "dw_slot_memory";

// device: the backend's number of it. false and nullptr: no memory, unless said otherwise.
struct slot_memory {
    const char * (*refusal)(int device); // why it cannot, a text that lives as long as the process; nullptr: it can
    size_t (*page)(int device);          // bytes that mapped parts are multiples of

    void * (*reserve)(int device, size_t n_bytes); // addresses, aligned to a page
    bool (*map_host)(int device, void * at, size_t n_bytes);
    bool (*map_device)(int device, void * at, size_t n_bytes); // zeros
    void (*unmap)(int device, void * at, size_t n_bytes);      // a part as it was mapped; no launch may use it
    void (*release)(int device, void * at, size_t n_bytes);    // a range, all of whose parts are unmapped

    // Device memory without an address, which may be mapped in several places. nullptr: no memory, or none of this
    // kind.
    void * (*create)(int device, size_t n_bytes);
    bool (*map_shared)(int device, void * at, size_t n_bytes, void * memory); // its first bytes, zeros
    void (*destroy)(int device, void * memory);                               // once it is unmapped everywhere

    void * (*allocate)(int device, size_t n_bytes); // on the device, zeros
    void (*free)(int device, void * at);
    bool (*copy)(int device, void * to, const void * from, size_t n_bytes); // any of these memories, or the host's

    expert_slots::stage * (*make_stage)(int device); // stage.h; nullptr: none here
    void (*free_stage)(int device, expert_slots::stage * stage);

    expert_slots::copy_streams * (*make_streams)(int device); // copy-streams.h; nullptr: none here
    void (*free_streams)(int device, expert_slots::copy_streams * copies);
};

extern const slot_memory slot_memory_on_cpu, slot_memory_on_cuda;

} // namespace dw
