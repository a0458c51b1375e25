// Factors of a verify and their commit: see tree_state.h.

#include "tree_state.h"

#include "ggml-backend.h"
#include "llama-context.h"
#include "llama-memory-hybrid.h"
#include "llama-model.h"
#include "status.h"

namespace draftwood {

namespace {

// a node that runs `op` and writes to dst in place
ggml_tensor * custom(ggml_context * ctx, ggml_tensor * dst, ggml_custom_op_t op, std::vector<ggml_tensor *> sources) {
    return ggml_custom_inplace(ctx, dst, sources.data(), (int) sources.size(), op, GGML_N_TASKS_MAX, nullptr);
}

ggml_custom_op_t find_op(ggml_backend_dev_t dev, const char * name) {
    return (ggml_custom_op_t) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dev), name);
}

bool on_cpu(const ggml_tensor * t) {
    return !t || (t->type == GGML_TYPE_F32 && ggml_backend_buffer_is_host(t->buffer));
}

} // namespace

std::unique_ptr<tree_state> tree_state::make(llama_context * target, int32_t max_nodes, std::string & why_not) {
    const llama_model & model  = *llama_get_model(target);
    auto *              memory = dynamic_cast<llama_memory_hybrid *>(llama_get_memory(target));
    if ((model.arch != LLM_ARCH_QWEN35 && model.arch != LLM_ARCH_QWEN35MOE) || !memory) {
        why_not = "trees are verified on qwen35 and qwen35moe";
        return nullptr;
    }
    if (!target->get_cparams().fused_gdn_ar || !target->get_cparams().fused_gdn_ch) {
        why_not = "the context runs the delta net without its fused op";
        return nullptr;
    }
    ggml_backend_t cpu_backend = dw_cpu_backend(target);
    if (!cpu_backend) {
        why_not = "the context has no CPU backend";
        return nullptr;
    }
    ggml_backend_dev_t cpu = ggml_backend_get_device(cpu_backend);
    for (size_t il = 0; il < memory->get_mem_recr()->s_l.size(); ++il) {
        if (!on_cpu(memory->get_mem_recr()->s_l[il]) || !on_cpu(memory->get_mem_recr()->r_l[il])) {
            why_not = "the state of layer " + std::to_string(il) + " is on a device without the tree ops";
            return nullptr;
        }
    }
    const ops found = { find_op(cpu, "dw_tree_conv_windows"), find_op(cpu, "dw_tree_delta_net"),
                        find_op(cpu, "dw_tree_commit_state"), find_op(cpu, "dw_tree_commit_conv") };
    if (!found.conv_windows || !found.delta_net || !found.commit_state || !found.commit_conv) {
        why_not = "the CPU backend in use has no tree ops";
        return nullptr;
    }
    ggml_backend_ptr backend(ggml_backend_dev_init(cpu, nullptr));
    if (!backend) {
        why_not = "no second CPU backend could be made";
        return nullptr;
    }
    return std::unique_ptr<tree_state>(new tree_state(target, memory, std::move(backend), found, max_nodes));
}

tree_state::tree_state(llama_context * target, llama_memory_hybrid * memory, ggml_backend_ptr backend,
                       const ops & found, int32_t max_nodes) :
    target_(target),
    memory_(memory),
    backend_(std::move(backend)),
    ops_(found),
    max_nodes_((int32_t) GGML_PAD(max_nodes, 16)) { // keeps each layer's factors on a cache line
    const llama_hparams & hparams = llama_get_model(target)->hparams;
    size_                         = hparams.ssm_d_state;
    n_heads_                      = hparams.ssm_dt_rank;
    n_key_heads_                  = hparams.ssm_n_group;
    n_channels_                   = hparams.ssm_d_inner + 2 * n_key_heads_ * size_;
    conv_width_                   = hparams.ssm_d_conv;
    n_factors_                    = max_nodes_ * (n_key_heads_ * size_ + n_heads_ * size_ + n_heads_);
    allocate();
}

void tree_state::allocate() {
    const auto & states = memory_->get_mem_recr()->s_l;
    tensors_.reset(ggml_init({ (states.size() + 4) * ggml_tensor_overhead(), nullptr, /*no_alloc*/ true }));

    int64_t n_used = 0;
    layers_.resize(states.size());
    for (size_t il = 0; il < states.size(); ++il) {
        if (states[il]) {
            layers_[il].conv_inputs = ggml_new_tensor_2d(tensors_.get(), GGML_TYPE_F32, n_channels_, max_nodes_);
            layers_[il].factors     = n_used * sizeof(float);
            n_used += n_factors_;
        }
    }
    // An op has one output, so a layer's follows its factors, where the next layer's begin: by then it was consumed.
    factors_ = ggml_new_tensor_1d(tensors_.get(), GGML_TYPE_F32, n_used + max_nodes_ * n_heads_ * size_);
    parents_ = ggml_new_tensor_1d(tensors_.get(), GGML_TYPE_I32, max_nodes_);
    path_    = ggml_new_tensor_1d(tensors_.get(), GGML_TYPE_I32, 1 + max_nodes_);
    buffer_.reset(ggml_backend_alloc_ctx_tensors(tensors_.get(), backend_.get()));
    if (!buffer_) {
        fail(DW_ERR_MEMORY, "no memory for the factors of %d draft tokens", max_nodes_);
    }
}

int32_t tree_state::cell() const {
    const auto & cells = memory_->get_mem_recr()->cells;
    return cells.empty() ? -1 : cells[0].tail;
}

bool tree_state::ready() const {
    const llama_memory_recurrent & recurrent = *memory_->get_mem_recr();
    const int32_t                  tail      = cell();
    return tail >= 0 && recurrent.cells[tail].src == tail && recurrent.cells[tail].seq_id.size() == 1 &&
           (recurrent.rs_idx.empty() || recurrent.rs_idx[0] == 0);
}

bool tree_state::holds(llama_pos n_tokens) const {
    return ready() && memory_->get_mem_recr()->cells[cell()].pos == n_tokens - 1;
}

void tree_state::set_tree(const int32_t * parents, int32_t n_nodes) {
    ggml_backend_tensor_set(parents_, parents, 0, n_nodes * sizeof(int32_t));
}

ggml_tensor * tree_state::conv_input(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cell, ggml_tensor * x,
                                     int il) {
    const int64_t n_nodes = x->ne[1];
    ggml_tensor * inputs  = layers_[il].conv_inputs;
    ggml_tensor * kept =
        ggml_cpy(ctx, x, ggml_view_2d(ctx, inputs, n_channels_, n_nodes, inputs->nb[1], 0)); // for the commit
    ggml_build_forward_expand(graph, kept);

    ggml_tensor * sources[] = { kept, memory_->get_mem_recr()->r_l[il], cell, parents_ };
    return ggml_custom_4d(ctx, GGML_TYPE_F32, conv_width_, n_channels_, n_nodes, 1, sources, 4, ops_.conv_windows,
                          GGML_N_TASKS_MAX, nullptr);
}

ggml_tensor * tree_state::delta_net(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cell, ggml_tensor * q,
                                    ggml_tensor * k, ggml_tensor * v, ggml_tensor * g, ggml_tensor * beta, int il) {
    const int64_t n_nodes = v->ne[2];
    ggml_tensor * both    = ggml_view_1d(ctx, factors_, n_factors_ + n_nodes * n_heads_ * size_, layers_[il].factors);
    both = custom(ctx, both, ops_.delta_net, { q, k, v, g, beta, memory_->get_mem_recr()->s_l[il], cell, parents_ });
    ggml_build_forward_expand(graph, both);
    return ggml_view_4d(ctx, both, size_, n_heads_, n_nodes, 1, size_ * sizeof(float), n_heads_ * size_ * sizeof(float),
                        n_nodes * n_heads_ * size_ * sizeof(float), n_factors_ * sizeof(float));
}

// one node for the state and one for the conv inputs of each layer, all in place
void tree_state::build_commit(int32_t cell) {
    const llama_memory_recurrent & recurrent = *memory_->get_mem_recr();
    const size_t                   n_nodes   = 5 * layers_.size(); // three views and two ops a layer
    commit_tensors_.reset(ggml_init(
        { n_nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_nodes, false), nullptr, /*no_alloc*/ true }));
    ggml_context * ctx = commit_tensors_.get();
    commit_graph_      = ggml_new_graph_custom(ctx, n_nodes, /*grads*/ false);
    commit_cell_       = cell;

    for (size_t il = 0; il < layers_.size(); ++il) {
        if (!layers_[il].conv_inputs) {
            continue;
        }
        ggml_tensor * s       = recurrent.s_l[il];
        ggml_tensor * r       = recurrent.r_l[il];
        ggml_tensor * factors = ggml_view_1d(ctx, factors_, n_factors_, layers_[il].factors);
        ggml_tensor * state   = ggml_view_3d(ctx, s, size_, size_, n_heads_, size_ * sizeof(float),
                                             size_ * size_ * sizeof(float), cell * s->nb[1]);
        ggml_tensor * conv =
            ggml_view_2d(ctx, r, conv_width_ - 1, n_channels_, (conv_width_ - 1) * sizeof(float), cell * r->nb[1]);
        ggml_build_forward_expand(commit_graph_, custom(ctx, state, ops_.commit_state, { factors, path_ }));
        ggml_build_forward_expand(commit_graph_,
                                  custom(ctx, conv, ops_.commit_conv, { layers_[il].conv_inputs, path_ }));
    }
}

void tree_state::set_n_threads() {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend_.get()));
    auto set = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    if (set) {
        set(backend_.get(), (int) llama_n_threads(target_));
    }
}

void tree_state::commit(const int32_t * path, int32_t n, llama_pos pos) {
    const int32_t tail = cell();
    if (tail != commit_cell_) {
        build_commit(tail);
    }
    ggml_backend_tensor_set(path_, &n, 0, sizeof(n));
    ggml_backend_tensor_set(path_, path, sizeof(n), n * sizeof(int32_t));
    set_n_threads();
    const ggml_status status = ggml_backend_graph_compute(backend_.get(), commit_graph_);
    if (status != GGML_STATUS_SUCCESS) {
        fail(DW_ERR_DECODE, "the commit of %d tokens at position %d failed with ggml status %d", n, pos, (int) status);
    }
    memory_->get_mem_attn()->seq_rm(0, pos + n, -1);
    memory_->get_mem_recr()->cells[tail].pos = pos + n - 1;
}

} // namespace draftwood
