// What tests/ops/cuda_on_cpu.py calls: our CUDA descriptors, which run on the CPU here. Must not know: tests.

#include "ops/copies/copies.cuh"
#include "ops/door/launch.h"
#include "ops/expert-slots/expert-slots.h"
#include "ops/expert-slots/guess.h"
#include "ops/layer-parts/layer-parts.h"
#include "ops/top-rows/top-rows.h"
#include "ops/tree-attention/tree-attention.h"
#include "ops/tree-delta-net/tree-ops.h"

#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <functional>
#include <map>
#include <vector>

namespace {

using namespace dw;

const op_descriptor * const ops[] = {
    &tree_conv_windows::on_cuda,
    &tree_delta_net::on_cuda,
    &tree_commit_state::on_cuda,
    &tree_commit_conv::on_cuda,
    &tree_commit_rows::on_cuda,
    &tree_commit_columns::on_cuda,
    &top_rows::on_cuda,
    &expert_slots::on_cuda,
    &expert_slots::ready_on_cuda,
    &expert_slots::guess_on_cuda,
    &layer_parts::experts::on_cuda,
    &layer_parts::choice::on_cuda,
    &layer_parts::chosen_experts::on_cuda,
    &layer_parts::feed_forward::on_cuda,
    &layer_parts::norm_of_rows::on_cuda,
    &layer_parts::product_of_rows::on_cuda,
    &layer_parts::delta_inputs::on_cuda,
    &layer_parts::attention_inputs::on_cuda,
    &layer_parts::draft_input::on_cuda,
    &layer_parts::delta_front::on_cuda,
    &layer_parts::delta_heads::on_cuda,
    &layer_parts::delta_tree::on_cuda,
    &layer_parts::delta_step::on_cuda,
    &layer_parts::delta_output::on_cuda,
    &layer_parts::attention_heads::on_cuda,
    &layer_parts::flash_attention::on_cuda,
    &layer_parts::attention_output::on_cuda,
};

const op_descriptor * of_node(const ggml_tensor * node) {
    for (const op_descriptor * each : ops) {
        if (std::strcmp(each->signature.name, node->name) == 0) {
            return each;
        }
    }
    return nullptr;
}

std::map<const void *, int>       launches; // by kernel
std::deque<std::function<void()>> queued;

} // namespace

void cuda_on_cpu::count_launch(const void * kernel) {
    ++launches[kernel];
}

void cuda_on_cpu::queue(std::function<void()> launch) {
    queued.push_back(std::move(launch));
}

// All that is beside the step, in the order of its launches: who waits for one of them may find others done.
void cuda_on_cpu::run_queued() {
    for (; !queued.empty(); queued.pop_front()) {
        queued.front()();
    }
}

// Launches until now of kernels whose names, as the linker has them, have this part. Those of unnamed namespaces have
// none.
extern "C" int cuda_on_cpu_launches(const char * part) {
    int n = 0;
    for (const auto & [kernel, n_launches] : launches) {
        Dl_info of;
        if (dladdr(kernel, &of) && of.dli_saddr == kernel && std::strstr(of.dli_sname, part)) {
            n += n_launches;
        }
    }
    return n;
}

// whether a card would run the node; its operands are all there
extern "C" bool cuda_on_cpu_takes(const ggml_tensor * node) {
    const op_descriptor * op = of_node(node);
    return op && op->takes(node);
}

extern "C" void cuda_on_cpu_copy(const piece * pieces, int n) {
    copy_pieces(pieces, n, nullptr);
}

// Runs it. Its operands and result lie in host memory. The workspace begins as 0xFF bytes.
extern "C" bool cuda_on_cpu_launch(ggml_tensor * node) {
    if (!cuda_on_cpu_takes(node)) {
        return false;
    }
    const op_descriptor * op      = of_node(node);
    const size_t          n_bytes = op->workspace ? op->workspace(node) : 0;
    std::vector<char>     memory(n_bytes + 128, (char) 0xff);
    void *                workspace = (void *) (((uintptr_t) memory.data() + 127) / 128 * 128);
    op->launch({ 0, nullptr, n_bytes ? workspace : nullptr, n_bytes, layer_of(node) }, node);
    return true;
}
