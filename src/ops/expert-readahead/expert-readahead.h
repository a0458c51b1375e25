// Experts of a model that is larger than memory: an op behind the router has the chosen ones read from their file.
//
// Such a model lies in a mapped file. A product that meets a page which is not in memory waits for the disk, once a
// few pages. This op asks for all pages of all chosen experts at once, so the disk reads them side by side, in large
// pieces, while the first product begins. What is in memory already is left alone.
//
// Batches of more than max_rows rows choose most experts. A product reads those in the file's order, which the kernel's
// own readahead does well, and a layer may be larger than memory. The op asks for nothing there.
//
// On a CPU of Linux. Elsewhere it asks for nothing. Test: tests/model/test_expert_readahead.py.

#pragma once

#include "ops/door/custom-op.h"

#include <atomic>
#include <cstdint>

namespace dw::expert_readahead {

constexpr int32_t max_parts   = 3;    // tensors with experts of a layer: gate, up and down
constexpr int32_t max_experts = 1024; // of a layer
constexpr int32_t max_rows    = 64;   // a verify; prompts have more

struct part {
    char *  base;   // expert 0, in the mapped file
    int64_t stride; // bytes of an expert
};

// What a node's layer pointer points to. It belongs to experts/readahead.h.
struct layer {
    int32_t n_experts, n_parts;
    part    parts[max_parts];
    bool    may_look; // whether the kernel says what is in memory; else all pages of chosen experts are asked for

    mutable std::atomic<bool> is_random; // the kernel was told not to read around a missing page

    // since the start; a step's experts are counted once, however many rows chose them
    mutable std::atomic<int64_t> n_steps, n_experts_used, n_experts_read, bytes_read;
};

// Asks for the chosen experts' pages.
//   dst i32[k, R]: ids
//   ids i32[k, R], rows may be strided: the router's choice
enum src { ids, n_src };
constexpr const char *     operands[n_src] = { "ids" };
constexpr op_signature     signature       = { "dw_expert_readahead", operands, n_src };
extern const op_descriptor on_cpu;

} // namespace dw::expert_readahead
