// What the backend of a device offers by name: how our ops and counters are found, whether or not it is a module.
// Test: tests/ops/test_door.py.

#pragma once

#include "ggml-backend.h"
#include "ops/door/custom-op.h"

namespace draftwood {

// nullptr: the backend has no such name
inline void * find_in_registry(ggml_backend_dev_t dev, const char * name) {
    ggml_backend_reg_t reg = dev ? ggml_backend_dev_backend_reg(dev) : nullptr;
    return reg ? ggml_backend_reg_get_proc_address(reg, name) : nullptr;
}

inline ggml_backend_dev_t cpu_device() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

// whether nodes of this op can run there at all
inline bool has_op(ggml_backend_dev_t dev, const dw::op_signature & op) {
    return cpu_device() && find_in_registry(cpu_device(), op.name) && find_in_registry(dev, op.name);
}

// An op for nodes of one kind of device. Nodes made for a CPU never run on a GPU. An op that the device does not have
// is the CPU's.
inline dw_custom_op find_op(ggml_backend_dev_t dev, const dw::op_signature & op) {
    const auto * reference = (const dw::op_descriptor *) find_in_registry(cpu_device(), op.name);
    const auto * of_device = (const dw::op_descriptor *) find_in_registry(dev, op.name);
    return { reference, of_device ? of_device : reference };
}

} // namespace draftwood
