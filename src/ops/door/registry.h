// What the backend of a device offers by name: how our ops and counters are found, whether or not it is a module.

#pragma once

#include "ggml-backend.h"
#include "ops/door/custom-op.h"

namespace draftwood {

inline void * find_in_registry(ggml_backend_dev_t dev, const char * name) {
    return ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dev), name);
}

inline ggml_backend_dev_t cpu_device() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

// An op as a node carries it, for one kind of device: the CPU's function wherever it runs, the device's launcher
// beside it.
inline dw_custom_op find_op(ggml_backend_dev_t dev, const char * name) {
    void * launcher = dev == cpu_device() ? nullptr : find_in_registry(dev, name);
    return { (ggml_custom_op_t) find_in_registry(cpu_device(), name), (dw_cuda_launch_t) launcher };
}

// let nodes with this descriptor, which must live as long as the process, run on the device; no effect on a CPU
inline void admit_op(ggml_backend_dev_t dev, const dw_custom_op & op) {
    if (const auto admit = (dw_cuda_admit_t) find_in_registry(dev, "dw_cuda_admit")) {
        admit(&op);
    }
}

// whether nodes of this name can run there at all
inline bool has_op(ggml_backend_dev_t dev, const char * name) {
    return cpu_device() && find_in_registry(cpu_device(), name) && find_in_registry(dev, name);
}

} // namespace draftwood
