// The backends that a llama_context computes with. Owner of each backend: the context.
// Test: tests/model/test_row_exact.py, tests/gpu.

#pragma once

#include "ggml-backend.h"

#include <cstdint>

struct llama_context;

namespace draftwood {

// the context's CPU backend; nullptr: none
ggml_backend_t cpu_backend(llama_context * ctx) noexcept;

// the context's backend on the device of `tensor`, or its CPU backend if that is host memory; nullptr: none
ggml_backend_t backend_of(llama_context * ctx, const ggml_tensor * tensor);

// devices of the context that are neither CPUs nor accelerators beside one
int32_t n_gpus(llama_context * ctx);

// whether tensors are split over devices (LLAMA_SPLIT_MODE_TENSOR)
bool splits_tensors(llama_context * ctx);

// Whether the backend's device has n_bytes free and some to spare: ggml-cuda ends the process when a kernel's memory
// cannot grow. true for a CPU, and for a device that does not know.
bool has_spare_memory(ggml_backend_t backend, size_t n_bytes);

// Chooses the CPU kernels: those whose rows do not depend on each other's number, or llama.cpp's. Returns false if the
// backend offers no choice.
bool use_exact_kernels(ggml_backend_t backend_cpu, bool exact) noexcept;

} // namespace draftwood
