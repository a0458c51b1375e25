// One device's part of a tree state: see tree_device.h.

#include "verify/tree_device.h"

#include "llama/status.h"
#include "ops/door/registry.h"

namespace draftwood {

namespace {

ggml_tensor * custom(ggml_context * ctx, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3,
                     std::vector<ggml_tensor *> sources, const dw_custom_op & op) {
    return ggml_custom_4d(ctx, GGML_TYPE_F32, ne0, ne1, ne2, ne3, sources.data(), (int) sources.size(), op.cpu,
                          GGML_N_TASKS_MAX, const_cast<dw_custom_op *>(&op));
}

// a node that writes to dst in place
ggml_tensor * custom_in_place(ggml_context * ctx, ggml_tensor * dst, std::vector<ggml_tensor *> sources,
                              const dw_custom_op & op) {
    return ggml_custom_inplace(ctx, dst, sources.data(), (int) sources.size(), op.cpu, GGML_N_TASKS_MAX,
                               const_cast<dw_custom_op *>(&op));
}

tree_op_set make_ops(ggml_backend_dev_t dev) {
    return { find_op(dev, "dw_tree_conv_windows"), find_op(dev, "dw_tree_delta_net"),
             find_op(dev, "dw_tree_commit_state"), find_op(dev, "dw_tree_commit_conv"),
             find_op(dev, "dw_tree_scores"),       find_op(dev, "dw_tree_values"),
             find_op(dev, "dw_tree_commit_rows"),  find_op(dev, "dw_tree_commit_columns") };
}

} // namespace

// One set for CPUs and one for CUDA, for the life of the process: nodes of kept graphs point into it.
const tree_op_set * find_tree_ops(ggml_backend_dev_t dev) {
    if (!has_op(dev, "dw_tree_delta_net")) {
        return nullptr;
    }
    if (dev == cpu_device()) {
        static const tree_op_set on_cpu = make_ops(dev);
        return &on_cpu;
    }
    static const tree_op_set on_gpu = make_ops(dev);
    for (const dw_custom_op * op : { &on_gpu.conv_windows, &on_gpu.delta_net, &on_gpu.commit_state, &on_gpu.commit_conv,
                                     &on_gpu.commit_rows, &on_gpu.commit_columns }) {
        admit_op(dev, *op);
    }
    return &on_gpu;
}

tree_device::tree_device(ggml_backend_t backend, const tree_op_set & ops, const tree_shape & shape, residents here) :
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
        layers_[il].model = model;
    }
    allocate();
}

void tree_device::allocate() {
    tensors_.reset(ggml_init({ (layers_.size() + 5) * ggml_tensor_overhead(), nullptr, /*no_alloc*/ true }));
    int64_t n_used = 0;
    for (auto & [_, layer] : layers_) {
        layer.conv_inputs = ggml_new_tensor_2d(tensors_.get(), GGML_TYPE_F32, shape_.n_channels, shape_.max_rows);
        layer.factors     = n_used * sizeof(float);
        n_used += shape_.n_factors();
    }
    // An op has one output, so a layer's follows its factors, where the next layer's begin: by then it was consumed.
    const int64_t n_out = shape_.max_rows * shape_.n_heads * shape_.size;
    factors_            = ggml_new_tensor_1d(tensors_.get(), GGML_TYPE_F32, n_used + n_out);
    tree_               = ggml_new_tensor_2d(tensors_.get(), GGML_TYPE_I32, shape_.max_rows, 4);
    path_               = ggml_new_tensor_1d(tensors_.get(), GGML_TYPE_I32, 1 + shape_.max_rows);
    moves_              = ggml_new_tensor_1d(tensors_.get(), GGML_TYPE_I32, 1 + 2 * shape_.max_rows);
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
    ggml_tensor * kept =
        ggml_cpy(ctx, ggml_reshape_2d(ctx, x, shape_.n_channels, n_rows), // for the commit
                 ggml_view_2d(ctx, here.conv_inputs, shape_.n_channels, n_rows, here.conv_inputs->nb[1], 0));
    ggml_build_forward_expand(graph, kept);
    return custom(ctx, shape_.conv_width, shape_.n_channels, n_rows, 1, { kept, here.model.conv_states, cells, tree_ },
                  ops_.conv_windows);
}

ggml_tensor * tree_device::delta_net(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cells, ggml_tensor * q,
                                     ggml_tensor * k, ggml_tensor * v, ggml_tensor * g, ggml_tensor * beta,
                                     int32_t il) {
    const layer & here    = layers_.at(il);
    const int64_t n_nodes = v->ne[2];
    const int64_t n_seqs  = v->ne[3];
    const int64_t row     = shape_.size * shape_.n_heads;
    ggml_tensor * both    = ggml_view_1d(ctx, factors_, shape_.n_factors() + n_nodes * n_seqs * row, here.factors);
    both = custom_in_place(ctx, both, { q, k, v, g, beta, here.model.states, cells, tree_ }, ops_.delta_net);
    ggml_build_forward_expand(graph, both);
    return ggml_view_4d(ctx, both, shape_.size, shape_.n_heads, n_nodes, n_seqs, shape_.size * sizeof(float),
                        row * sizeof(float), n_nodes * row * sizeof(float), shape_.n_factors() * sizeof(float));
}

ggml_tensor * tree_device::attn_scores(ggml_context * ctx, ggml_tensor * scores) {
    return custom_in_place(ctx, scores, { tree_ }, ops_.scores);
}

ggml_tensor * tree_device::attn_values(ggml_context * ctx, ggml_tensor * values, ggml_tensor * weights) {
    return custom(ctx, values->ne[1], weights->ne[1], weights->ne[2], weights->ne[3], { values, weights, tree_ },
                  ops_.values);
}

// keys and values of each attention layer to where plain decoding would have put them
void tree_device::build_commit_of_caches(commit_graph & commit) {
    ggml_context * ctx = commit.tensors.get();
    for (const cache & each : caches_) {
        ggml_tensor * t = each.tensor;
        if (each.transposed) {
            t = ggml_view_3d(ctx, t, t->ne[1], t->ne[0], t->ne[2], t->ne[1] * t->nb[0], t->nb[2], 0);
        }
        ggml_build_forward_expand(
            commit.graph,
            custom_in_place(ctx, t, { moves_ }, each.transposed ? ops_.commit_columns : ops_.commit_rows));
    }
}

// one node for the state and one for the conv inputs of each recurrent layer, one for each tensor of the cache, all in
// place
void tree_device::prepare_commit(int32_t cell) {
    commit_graph & commit = commits_[cell];
    if (commit.graph) {
        return;
    }
    const size_t n_nodes = 5 * layers_.size() + 2 * caches_.size(); // ops and their views
    commit.memory.resize(n_nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_nodes, false));
    commit.tensors.reset(ggml_init({ commit.memory.size(), commit.memory.data(), /*no_alloc*/ true }));
    ggml_context * ctx = commit.tensors.get();
    commit.graph       = ggml_new_graph_custom(ctx, n_nodes, /*grads*/ false);
    build_commit_of_caches(commit);
    const int64_t size = shape_.size, width = shape_.conv_width - 1;
    for (const auto & [_, layer] : layers_) {
        ggml_tensor * s       = layer.model.states;
        ggml_tensor * r       = layer.model.conv_states;
        ggml_tensor * factors = ggml_view_1d(ctx, factors_, shape_.n_factors(), layer.factors);
        ggml_tensor * state   = ggml_view_3d(ctx, s, size, size, shape_.n_heads, size * sizeof(float),
                                             size * size * sizeof(float), cell * s->nb[1]);
        ggml_tensor * conv    = ggml_view_2d(ctx, r, width, shape_.n_channels, width * sizeof(float), cell * r->nb[1]);
        ggml_build_forward_expand(commit.graph, custom_in_place(ctx, state, { factors, path_ }, ops_.commit_state));
        ggml_build_forward_expand(commit.graph,
                                  custom_in_place(ctx, conv, { layer.conv_inputs, path_ }, ops_.commit_conv));
    }
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
