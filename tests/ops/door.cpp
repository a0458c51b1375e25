// Nodes as ops/door/node.h builds them, for tests/ops/test_door.py.

#include "ggml-impl.h"
#include "ops/door/node.h"
#include "ops/tree-delta-net/tree-ops.h"

namespace op = dw::tree_commit_conv;

// A node in place with its operands given in any order. Returns what is wrong with it, or NULL.
extern "C" const char * door_failure(const dw::op_descriptor * reference, const dw::op_descriptor * of_device) {
    ggml_context *      ctx   = ggml_init({ 1 << 16, nullptr, /*no_alloc*/ true });
    ggml_tensor *       state = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 3, 4);
    ggml_tensor *       x     = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 4, 5);
    ggml_tensor *       path  = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, 6);
    const dw_custom_op  both  = { reference, of_device };
    const int           layer = 0;
    const ggml_tensor * node =
        dw::node_in_place(ctx, both, { { op::path, path }, { op::state, state }, { op::x, x } }, &layer);
    const ggml_tensor * bare = dw::node_in_place(ctx, both, { { op::state, state }, { op::x, x }, { op::path, path } });
    ggml_custom_op_params params;
    memcpy(&params, node->op_params, sizeof(params));
    const char * failure = node->op != GGML_OP_CUSTOM || node->view_src != state ? "no node in place"
                           : node->src[0] != state || node->src[1] != x || node->src[2] != path
                               ? "operands in another order"
                           : node->src[3] != nullptr                          ? "a fourth operand"
                           : params.fun != reference->cpu                     ? "another function"
                           : params.userdata != of_device                     ? "another descriptor"
                           : params.n_tasks != GGML_N_TASKS_MAX               ? "another number of tasks"
                           : dw::layer_of(node) != &layer                     ? "another layer pointer"
                           : dw::layer_of(bare) != nullptr                    ? "a layer pointer that none gave"
                           : std::strcmp(node->name, op::signature.name) != 0 ? "another name"
                                                                              : nullptr;
    ggml_free(ctx);
    return failure;
}
