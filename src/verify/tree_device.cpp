// One device's part of a tree state: see tree_device.h.

#include "verify/tree_device.h"

#include "llama/status.h"
#include "ops/door/node.h"
#include "ops/door/registry.h"
#include "ops/tree-attention/tree-attention.h"
#include "verify/tensor_runs.h"

#include <algorithm>
#include <tuple>

namespace draftwood {

namespace {

namespace windows      = dw::tree_conv_windows;
namespace delta        = dw::tree_delta_net;
namespace commit_state = dw::tree_commit_state;
namespace commit_conv  = dw::tree_commit_conv;

// "<its name>-<layer>", as llama.cpp names nodes
ggml_tensor * name_of_layer(ggml_tensor * tensor, const char * name, int32_t il) {
    return ggml_format_name(tensor, "%s-%d", name, il);
}

// "<the op>-<a tensor it works on>", where no layer is given
ggml_tensor * name_after(ggml_tensor * node, const dw_custom_op & op, const ggml_tensor * tensor) {
    return ggml_format_name(node, "%s-%s", op.name(), tensor->name);
}

tree_op_set make_ops(ggml_backend_dev_t dev) {
    return { find_op(dev, windows::signature),
             find_op(dev, delta::signature),
             find_op(dev, commit_state::signature),
             find_op(dev, commit_conv::signature),
             find_op(dev, dw::tree_scores::signature),
             find_op(dev, dw::tree_values::signature),
             find_op(dev, dw::tree_commit_rows::signature),
             find_op(dev, dw::tree_commit_columns::signature) };
}

} // namespace

// One set for CPUs and one for CUDA.
const tree_op_set * find_tree_ops(ggml_backend_dev_t dev) {
    if (!has_op(dev, delta::signature)) {
        return nullptr;
    }
    if (dev == cpu_device()) {
        static const tree_op_set on_cpu = make_ops(dev);
        return &on_cpu;
    }
    static const tree_op_set on_gpu = make_ops(dev);
    return &on_gpu;
}

tree_device::tree_device(ggml_backend_t backend, const tree_op_set & ops, const tree_shape & shape, residents here,
                         budget_share & share) :
    backend_(backend),
    ops_(ops),
    shape_(shape),
    caches_(std::move(here.caches)) {
    ggml_backend_dev_t dev = ggml_backend_get_device(backend);
    if (ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU) {
        own_backend_.reset(ggml_backend_dev_init(dev, nullptr));
        if (!own_backend_) {
            fail(DW_ERR_MEMORY, "no second CPU backend could be made for commits");
        }
    }
    for (const auto & [il, model] : here.layers) {
        const int64_t index = (int64_t) layers_.size();
        layers_[il]         = { model, index };
    }
    allocate(share);
}

void tree_device::allocate(budget_share & share) {
    tensors_.reset(ggml_init({ 5 * ggml_tensor_overhead(), nullptr, /*no_alloc*/ true }));
    const int64_t n_layers = (int64_t) layers_.size();
    // An op has one output tensor. A layer's output follows its factors, in the place of the next layer's factors: by
    // the time that these are written it has been read.
    const int64_t n_out = shape_.max_rows * shape_.n_heads * shape_.size;
    factors_            = ggml_new_tensor_1d(tensors_.get(), GGML_TYPE_F32, n_layers * shape_.n_factors() + n_out);
    conv_inputs_ = ggml_new_tensor_3d(tensors_.get(), GGML_TYPE_F32, shape_.n_channels, shape_.max_rows, n_layers);
    tree_        = ggml_new_tensor_2d(tensors_.get(), GGML_TYPE_I32, shape_.max_rows, 4);
    path_        = ggml_new_tensor_1d(tensors_.get(), GGML_TYPE_I32, 1 + shape_.max_rows);
    moves_       = ggml_new_tensor_1d(tensors_.get(), GGML_TYPE_I32, 1 + 2 * shape_.max_rows);
    ggml_set_name(factors_, "dw_tree_factors");
    ggml_set_name(conv_inputs_, "dw_tree_conv_inputs");
    ggml_set_name(tree_, "dw_tree");
    ggml_set_name(path_, "dw_tree_path");
    ggml_set_name(moves_, "dw_tree_moves");
    ggml_backend_buffer_type_t type = ggml_backend_get_default_buffer_type(commit_backend());
    memory_ = { share, (int64_t) ggml_backend_alloc_ctx_tensors_from_buft_size(tensors_.get(), type) };
    buffer_.reset(ggml_backend_alloc_ctx_tensors(tensors_.get(), commit_backend()));
    if (!buffer_) {
        fail(DW_ERR_MEMORY, "no memory on %s for the factors of %lld draft tokens", ggml_backend_name(backend_),
             (long long) shape_.max_rows);
    }
}

// The host's copy may change as soon as this returns: what is not pinned is staged.
void tree_device::set(ggml_tensor * to, const std::vector<int32_t> & values) {
    ggml_backend_tensor_set_async(commit_backend(), to, values.data(), 0, values.size() * sizeof(int32_t));
}

void tree_device::set_tree(const std::vector<int32_t> & rows) {
    set(tree_, rows);
}

ggml_tensor * tree_device::conv_input(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cells, ggml_tensor * x,
                                      int32_t il) {
    const layer & here   = layers_.at(il);
    const int64_t n_rows = x->ne[1] * x->ne[2];
    ggml_tensor * kept   = ggml_cpy(ctx, ggml_reshape_2d(ctx, x, shape_.n_channels, n_rows), // for the commit
                                    ggml_view_2d(ctx, conv_inputs_, shape_.n_channels, n_rows, conv_inputs_->nb[1],
                                                 here.index * conv_inputs_->nb[2]));
    name_of_layer(kept, "dw_tree_conv_kept", il);
    ggml_build_forward_expand(graph, kept);
    ggml_tensor * node = dw::new_node(ctx, ops_.conv_windows, { shape_.conv_width, shape_.n_channels, n_rows, 1 },
                                      { { windows::x, kept },
                                        { windows::states, here.model.conv_states },
                                        { windows::cells, cells },
                                        { windows::tree, tree_ } });
    return name_of_layer(node, ops_.conv_windows.name(), il);
}

ggml_tensor * tree_device::delta_net(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cells, ggml_tensor * q,
                                     ggml_tensor * k, ggml_tensor * v, ggml_tensor * g, ggml_tensor * beta,
                                     int32_t il) {
    const layer & here    = layers_.at(il);
    const int64_t n_nodes = v->ne[2];
    const int64_t n_seqs  = v->ne[3];
    const int64_t row     = shape_.size * shape_.n_heads;
    ggml_tensor * scratch = ggml_view_1d(ctx, factors_, shape_.n_factors() + n_nodes * n_seqs * row,
                                         here.index * shape_.n_factors() * sizeof(float));
    name_of_layer(scratch, "dw_tree_scratch", il);
    ggml_tensor * both = dw::node_in_place(ctx, ops_.delta_net,
                                           { { delta::scratch, scratch },
                                             { delta::q, q },
                                             { delta::k, k },
                                             { delta::v, v },
                                             { delta::g, g },
                                             { delta::beta, beta },
                                             { delta::states, here.model.states },
                                             { delta::cells, cells },
                                             { delta::tree, tree_ } });
    name_of_layer(both, ops_.delta_net.name(), il);
    ggml_build_forward_expand(graph, both);
    ggml_tensor * out =
        ggml_view_4d(ctx, both, shape_.size, shape_.n_heads, n_nodes, n_seqs, shape_.size * sizeof(float),
                     row * sizeof(float), n_nodes * row * sizeof(float), shape_.n_factors() * sizeof(float));
    return name_of_layer(out, "dw_tree_delta_out", il);
}

ggml_tensor * tree_device::attn_scores(ggml_context * ctx, ggml_tensor * scores) {
    namespace op       = dw::tree_scores;
    ggml_tensor * node = dw::node_in_place(ctx, ops_.scores, { { op::scores, scores }, { op::tree, tree_ } });
    return name_after(node, ops_.scores, scores);
}

// llama.cpp names the tensor that it gets "kqv": a view, so that the node keeps its own name.
ggml_tensor * tree_device::attn_values(ggml_context * ctx, ggml_tensor * values, ggml_tensor * weights) {
    namespace op = dw::tree_values;
    ggml_tensor * node =
        dw::new_node(ctx, ops_.values, { values->ne[1], weights->ne[1], weights->ne[2], weights->ne[3] },
                     { { op::values, values }, { op::weights, weights }, { op::tree, tree_ } });
    name_after(node, ops_.values, weights);
    return ggml_view_4d(ctx, node, node->ne[0], node->ne[1], node->ne[2], node->ne[3], node->nb[1], node->nb[2],
                        node->nb[3], 0);
}

// keys and values of each attention layer to where plain decoding would have put them
void tree_device::build_commit_of_caches(commit_graph & commit) {
    ggml_context *             ctx = commit.tensors.get();
    std::vector<ggml_tensor *> by_rows, by_columns;
    for (const cache & each : caches_) {
        ggml_tensor * t = each.tensor;
        if (each.transposed) {
            by_columns.push_back(ggml_view_3d(ctx, t, t->ne[1], t->ne[0], t->ne[2], t->ne[1] * t->nb[0], t->nb[2], 0));
        } else {
            by_rows.push_back(t);
        }
    }
    // keys and values of one type lie in turn, those of two types are two runs
    std::sort(by_rows.begin(), by_rows.end(), [](const ggml_tensor * a, const ggml_tensor * b) {
        return std::make_tuple(a->type, a->ne[0], a->data) < std::make_tuple(b->type, b->ne[0], b->data);
    });
    namespace rows    = dw::tree_commit_rows;
    namespace columns = dw::tree_commit_columns;
    for (const tensor_run & run : runs_of(by_rows)) {
        ggml_tensor * node = dw::node_in_place(
            ctx, ops_.commit_rows, { { rows::cache, as_one(ctx, by_rows, run, 3) }, { rows::moves, moves_ } });
        ggml_build_forward_expand(commit.graph, name_after(node, ops_.commit_rows, by_rows[run.first]));
    }
    for (const tensor_run & run : runs_of(by_columns)) {
        ggml_tensor * node =
            dw::node_in_place(ctx, ops_.commit_columns,
                              { { columns::cache, as_one(ctx, by_columns, run, 3) }, { columns::moves, moves_ } });
        ggml_build_forward_expand(commit.graph, name_after(node, ops_.commit_columns, by_columns[run.first]));
    }
}

// states and conv states of each recurrent layer
void tree_device::build_commit_of_states(commit_graph & commit, int32_t cell) {
    ggml_context *             ctx  = commit.tensors.get();
    const int64_t              size = shape_.size, width = shape_.conv_width - 1;
    std::vector<ggml_tensor *> states, conv_states;
    for (const auto & [il, layer] : layers_) {
        ggml_tensor * s = layer.model.states;
        ggml_tensor * r = layer.model.conv_states;
        states.push_back(ggml_view_3d(ctx, s, size, size, shape_.n_heads, size * sizeof(float),
                                      size * size * sizeof(float), cell * s->nb[1]));
        conv_states.push_back(ggml_view_2d(ctx, r, width, shape_.n_channels, width * sizeof(float), cell * r->nb[1]));
    }
    for (const tensor_run & run : runs_of(states)) {
        const size_t  bytes   = shape_.n_factors() * sizeof(float);
        ggml_tensor * factors = ggml_view_2d(ctx, factors_, shape_.n_factors(), run.n, bytes, run.first * bytes);
        ggml_tensor * node    = dw::node_in_place(ctx, ops_.commit_state,
                                                  { { commit_state::state, as_one(ctx, states, run, 3) },
                                                    { commit_state::factors, factors },
                                                    { commit_state::path, path_ } });
        ggml_build_forward_expand(commit.graph, name_after(node, ops_.commit_state, states[run.first]->view_src));
    }
    for (const tensor_run & run : runs_of(conv_states)) {
        ggml_tensor * x    = ggml_view_3d(ctx, conv_inputs_, shape_.n_channels, shape_.max_rows, run.n,
                                          conv_inputs_->nb[1], conv_inputs_->nb[2], run.first * conv_inputs_->nb[2]);
        ggml_tensor * node = dw::node_in_place(ctx, ops_.commit_conv,
                                               { { commit_conv::state, as_one(ctx, conv_states, run, 2) },
                                                 { commit_conv::x, x },
                                                 { commit_conv::path, path_ } });
        ggml_build_forward_expand(commit.graph, name_after(node, ops_.commit_conv, conv_states[run.first]->view_src));
    }
}

void tree_device::prepare_commit(int32_t cell) {
    commit_graph & kept = commits_[cell];
    if (kept.graph) {
        return;
    }
    commit_graph commit; // kept when it is whole
    // at most, if no two layers are in one run: of each tensor a view, a run, another operand's view and the node
    const size_t n_tensors = 4 * (2 * layers_.size() + caches_.size());
    commit.memory.resize(n_tensors * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_tensors, false));
    commit.tensors.reset(ggml_init({ commit.memory.size(), commit.memory.data(), /*no_alloc*/ true }));
    commit.graph = ggml_new_graph_custom(commit.tensors.get(), n_tensors, /*grads*/ false);
    build_commit_of_caches(commit);
    build_commit_of_states(commit, cell);
    kept = std::move(commit);
}

void tree_device::commit(int32_t cell, const std::vector<int32_t> & path, const std::vector<int32_t> & moves,
                         int32_t n_threads) {
    set(path_, path);
    set(moves_, moves);
    if (own_backend_) {
        const auto set_n_threads =
            (ggml_backend_set_n_threads_t) find_in_registry(cpu_device(), "ggml_backend_set_n_threads");
        if (set_n_threads) {
            set_n_threads(own_backend_.get(), n_threads);
        }
    }
    const ggml_status status = ggml_backend_graph_compute_async(commit_backend(), commits_.at(cell).graph);
    if (status != GGML_STATUS_SUCCESS) {
        fail(DW_ERR_DECODE, "the commit of %d tokens failed with ggml status %d", path[0], (int) status);
    }
}

} // namespace draftwood
