// See door.h.

#include "ops/door/door.h"

#include "common.cuh"
#include "ops/door/custom-op.h"
#include "ops/door/launchers.h"

#include <atomic>
#include <cstring>

namespace {

struct op_entry {
    const char *     name;
    dw_cuda_launch_t launch;
    bool (*takes)(const ggml_tensor * node);
};

constexpr op_entry ops[] = {
    { "dw_tree_conv_windows", dw::launch_tree_conv_windows, dw::takes_tree_conv_windows },
    { "dw_tree_delta_net", dw::launch_tree_delta_net, dw::takes_tree_delta_net },
    { "dw_tree_commit_state", dw::launch_tree_commit_state, dw::takes_tree_commit_state },
    { "dw_tree_commit_conv", dw::launch_tree_commit_conv, dw::takes_tree_commit_conv },
    { "dw_tree_commit_rows", dw::launch_tree_commit_rows, dw::takes_tree_commit_rows },
    { "dw_tree_commit_columns", dw::launch_tree_commit_columns, dw::takes_tree_commit_columns },
    { "dw_top_rows", dw::launch_top_rows, dw::takes_top_rows },
};

// Descriptors that may be read. A slot is written once, so readers need no lock.
std::atomic<const dw_custom_op *> admitted[64];

void admit(const dw_custom_op * op) {
    for (auto & slot : admitted) {
        const dw_custom_op * expected = nullptr;
        if (slot.compare_exchange_strong(expected, op) || expected == op) {
            return;
        }
    }
    GGML_ABORT("draftwood: more than %zu descriptors of custom ops", sizeof(admitted) / sizeof(admitted[0]));
}

// the node's launcher; nullptr: the node is not ours, or not for a GPU
dw_cuda_launch_t launcher_of(const ggml_tensor * node) {
    if (node->op != GGML_OP_CUSTOM) {
        return nullptr;
    }
    ggml_custom_op_params params;
    std::memcpy(&params, node->op_params, sizeof(params));
    for (const auto & slot : admitted) {
        const dw_custom_op * op = slot.load();
        if (!op || op == params.userdata) {
            return op ? op->cuda : nullptr;
        }
    }
    return nullptr;
}

std::atomic<int64_t> n_all, n_replayed;

dw_cuda_launches launches() {
    return { n_all.load(), n_replayed.load() };
}

} // namespace

void * dw_cuda_find(const char * name) {
    for (const op_entry & entry : ops) {
        if (std::strcmp(entry.name, name) == 0) {
            return (void *) entry.launch;
        }
    }
    if (std::strcmp(name, "dw_cuda_admit") == 0) {
        return (void *) admit;
    }
    return std::strcmp(name, "dw_cuda_launches") == 0 ? (void *) launches : nullptr;
}

bool dw_cuda_supports(const ggml_tensor * node) {
    const dw_cuda_launch_t launch = launcher_of(node);
    for (const op_entry & entry : ops) {
        if (launch && entry.launch == launch) {
            return entry.takes(node);
        }
    }
    return false;
}

bool dw_cuda_compute(ggml_tensor * node, void * stream) {
    const dw_cuda_launch_t launch = launcher_of(node);
    if (!launch) {
        return false;
    }
    launch(node, stream);
    CUDA_CHECK(cudaGetLastError());
    return true;
}

void dw_cuda_count(bool use_graph, bool new_graph) {
    n_all++;
    n_replayed += use_graph && !new_graph;
}
