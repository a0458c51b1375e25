// See door.h.

#include "ops/door/door.h"

#include "common.cuh"
#include "ggml-backend-impl.h"
#include "ops/copies/copies.cuh"
#include "ops/door/launch.h"
#include "ops/expert-slots/expert-slots.h"
#include "ops/expert-slots/guess.h"
#include "ops/expert-slots/slot-memory.h"
#include "ops/layer-parts/layer-parts.h"
#include "ops/top-rows/top-rows.h"
#include "ops/tree-attention/tree-attention.h"
#include "ops/tree-delta-net/tree-factors.h"
#include "ops/tree-delta-net/tree-ops.h"

#include <atomic>
#include <cstring>

namespace {

const dw::op_descriptor * const ops[] = {
    &dw::tree_conv_windows::on_cuda,
    &dw::tree_delta_net::on_cuda,
    &dw::tree_commit_state::on_cuda,
    &dw::tree_commit_conv::on_cuda,
    &dw::tree_commit_rows::on_cuda,
    &dw::tree_commit_columns::on_cuda,
    &dw::top_rows::on_cuda,
    &dw::expert_slots::on_cuda,
    &dw::expert_slots::ready_on_cuda,
    &dw::expert_slots::guess_on_cuda,
    &dw::layer_parts::experts::on_cuda,
    &dw::layer_parts::choice::on_cuda,
    &dw::layer_parts::chosen_experts::on_cuda,
    &dw::layer_parts::feed_forward::on_cuda,
    &dw::layer_parts::norm_of_rows::on_cuda,
    &dw::layer_parts::product_of_rows::on_cuda,
    &dw::layer_parts::delta_inputs::on_cuda,
    &dw::layer_parts::attention_inputs::on_cuda,
    &dw::layer_parts::draft_input::on_cuda,
    &dw::layer_parts::delta_front::on_cuda,
    &dw::layer_parts::delta_heads::on_cuda,
    &dw::layer_parts::delta_tree::on_cuda,
    &dw::layer_parts::delta_step::on_cuda,
    &dw::layer_parts::delta_output::on_cuda,
    &dw::layer_parts::attention_heads::on_cuda,
    &dw::layer_parts::flash_attention::on_cuda,
    &dw::layer_parts::attention_output::on_cuda,
};

// The node's descriptor; nullptr: the node is not ours, or was made for the CPU. Only addresses are compared, so
// `userdata` may be anything.
const dw::op_descriptor * descriptor_of(const ggml_tensor * node) {
    if (node->op != GGML_OP_CUSTOM) {
        return nullptr;
    }
    ggml_custom_op_params params;
    std::memcpy(&params, node->op_params, sizeof(params));
    for (const dw::op_descriptor * op : ops) {
        if (op == params.userdata) {
            return op;
        }
    }
    return nullptr;
}

bool has_operands(const ggml_tensor * node, const dw::op_signature & op) {
    for (int i = 0; i < GGML_MAX_SRC; ++i) {
        if (node->src[i] ? i >= op.n_operands : i < op.n_operands - op.n_optional) {
            return false;
        }
    }
    return true;
}

std::atomic<int64_t> n_all, n_replayed;

void copy(ggml_backend_t backend, const dw::piece * pieces, int n) {
    auto & ctx = *(ggml_backend_cuda_context *) backend->context;
    ggml_cuda_set_device(ctx.device);
    dw::copy_pieces(pieces, n, ctx.stream());
    CUDA_CHECK(cudaGetLastError());
}

dw_cuda_launches launches() {
    return { n_all.load(), n_replayed.load() };
}

} // namespace

void * dw_cuda_find(const char * name) {
    for (const dw::op_descriptor * op : ops) {
        if (std::strcmp(op->signature.name, name) == 0) {
            return const_cast<dw::op_descriptor *>(op);
        }
    }
    if (std::strcmp(name, dw::slot_memory_name) == 0) {
        return const_cast<dw::slot_memory *>(&dw::slot_memory_on_cuda);
    }
    if (std::strcmp(name, dw::copies_name) == 0) {
        return (void *) copy;
    }
    return std::strcmp(name, "dw_cuda_launches") == 0 ? (void *) launches : nullptr;
}

bool dw_cuda_supports(const ggml_tensor * node) {
    const dw::op_descriptor * op = descriptor_of(node);
    return op && has_operands(node, op->signature) && op->takes(node);
}

bool dw_cuda_has_delta_net(const ggml_tensor * node) {
    return dw::is_state_size(node->src[2]->ne[0]);
}

bool dw_cuda_compute(ggml_backend_cuda_context & ctx, ggml_tensor * node) {
    const dw::op_descriptor * op = descriptor_of(node);
    if (!op) {
        return false;
    }
    const size_t                  n_bytes = op->workspace ? op->workspace(node) : 0;
    ggml_cuda_pool_alloc<uint8_t> workspace;
    if (n_bytes > 0) {
        workspace.alloc(ctx.pool(), n_bytes);
    }
    op->launch({ ctx.device, ctx.stream(), workspace.get(), n_bytes, dw::layer_of(node) }, node);
    CUDA_CHECK(cudaGetLastError());
    return true;
}

void dw_cuda_count(bool use_graph, bool new_graph) {
    n_all++;
    n_replayed += use_graph && !new_graph;
}

void dw_cuda_instantiate(cudaGraphExec_t & instance, cudaGraph_t graph, cudaStream_t stream) {
    cudaError_t error = cudaGraphInstantiate(&instance, graph, nullptr, nullptr, 0);
    if (error == cudaSuccess) {
        error = cudaGraphUpload(instance, stream);
    } else {
        instance = nullptr;
    }
    if (error != cudaErrorMemoryAllocation) {
        CUDA_CHECK(error);
        return;
    }
    (void) cudaGetLastError();
    if (instance) {
        CUDA_CHECK(cudaGraphExecDestroy(instance));
        instance = nullptr;
    }
    GGML_LOG_WARN("%s: no memory on the card for a CUDA graph: its kernels are launched one by one\n", __func__);
}
