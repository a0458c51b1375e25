// Factors of a verify and their commit: see tree_state.h.

#include "tree_state.h"

#include "ggml-backend.h"
#include "llama-context.h"
#include "llama-memory-hybrid.h"
#include "llama-model.h"
#include "row_mask.h"
#include "status.h"
#include "tree-attention.h"

#include <algorithm>

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
    return !t || ggml_backend_buffer_is_host(t->buffer);
}

// the cache's tensor of values in layer il [n_embd, kv_size, n_streams]; the cache itself only offers views
ggml_tensor * value_storage(const llama_kv_cache & cache, ggml_context * ctx, int32_t il) {
    llama_kv_cache::slot_info whole{ 0, 0, {}, {} };
    return cache.get_v(ctx, il, 1, whole)->view_src;
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
    for (const uint32_t il : memory->get_mem_attn()->get_layer_ids()) {
        if (!on_cpu(memory->get_mem_attn()->get_k_storage((int32_t) il))) {
            why_not = "the KV cache of layer " + std::to_string(il) + " is on a device without the tree ops";
            return nullptr;
        }
    }
    const ops found = { find_op(cpu, "dw_tree_conv_windows"), find_op(cpu, "dw_tree_delta_net"),
                        find_op(cpu, "dw_tree_commit_state"), find_op(cpu, "dw_tree_commit_conv"),
                        find_op(cpu, "dw_tree_scores"),       find_op(cpu, "dw_tree_values"),
                        find_op(cpu, "dw_tree_commit_rows"),  find_op(cpu, "dw_tree_commit_columns") };
    if (!found.conv_windows) {
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
    max_nodes_((int32_t) GGML_PAD(max_nodes, 8)) { // keeps each layer's factors aligned
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
    tensors_.reset(ggml_init({ (states.size() + 5) * ggml_tensor_overhead(), nullptr, /*no_alloc*/ true }));

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
    tree_    = ggml_new_tensor_2d(tensors_.get(), GGML_TYPE_I32, max_nodes_, 4);
    path_    = ggml_new_tensor_1d(tensors_.get(), GGML_TYPE_I32, 1 + max_nodes_);
    moves_   = ggml_new_tensor_1d(tensors_.get(), GGML_TYPE_I32, 1 + 2 * max_nodes_);
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

void tree_state::set_tree(const token_tree & tree, int32_t n_rows) {
    const int32_t n = tree.size();
    rows_.assign(4 * (size_t) max_nodes_, 0);
    tokens_.resize(n_rows);
    int32_t * parents  = rows_.data();
    int32_t * depths   = parents + max_nodes_;
    int32_t * preorder = depths + max_nodes_;
    for (int32_t i = 0; i < n_rows; ++i) {
        const int32_t node = std::min(i, n - 1);
        tokens_[i]         = tree.tokens[node];
        parents[i]         = tree.parents[node];
        depths[i]          = tree.depths[node];
    }
    std::vector<int32_t> open(1, 0);
    for (int32_t o = 0; !open.empty(); ++o) {
        const int32_t i = preorder[o] = open.back();
        open.pop_back();
        for (int32_t child = n_rows - 1; child > i; --child) {
            if (parents[child] == i) {
                open.push_back(child);
            }
        }
    }
    ancestors_.resize(n_rows);
    for (int32_t i = 0; i < n_rows; ++i) {
        ancestors_[i] = (parents[i] < 0 ? 0 : ancestors_[parents[i]]) | uint64_t(1) << i;
    }
}

void tree_state::begin(const token_tree & tree, int32_t n_rows, llama_pos pos, bool exact) {
    set_tree(tree, n_rows);
    cells_.clear();
    pos_      = pos;
    branches_ = n_rows > tree.size() || !tree.is_chain();
    arranges_ = branches_ && exact && !target_->get_cparams().flash_attn;
    // llama_memory_recurrent warns of positions that are not one further than the last
    memory_->get_mem_recr()->cells[cell()].pos = pos + tree.height() - n_rows;
}

void tree_state::undo() {
    memory_->get_mem_attn()->seq_rm(0, pos_, -1);
    memory_->get_mem_recr()->cells[cell()].pos = pos_ - 1;
}

// Rows of a tree do not see their siblings. Where their scores are arranged, they lie as in plain decoding.
void tree_state::placed(const dw_placed_rows & rows) noexcept {
    const int64_t kv_size = memory_->get_mem_attn()->get_size();
    cells_.assign(rows.cells, rows.cells + rows.n);
    for (int64_t i = 0; i < rows.n; ++i) {
        rows_[3 * max_nodes_ + i] = (int32_t) (cells_[i] % kv_size);
    }
    ggml_backend_tensor_set(tree_, rows_.data(), 0, rows_.size() * sizeof(int32_t));
    for (int64_t i = 0; branches_ && i < rows.n; ++i) {
        for (int64_t j = 0; j < rows.n; ++j) {
            const bool visible = arranges_ ? j <= rows_[max_nodes_ + i] : (ancestors_[i] >> j & 1) != 0;
            set_visible(rows.kq_mask, i, rows_[3 * max_nodes_ + j], visible);
        }
    }
}

ggml_tensor * tree_state::conv_input(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cells, ggml_tensor * x,
                                     int il) {
    const int64_t n_nodes = x->ne[1];
    ggml_tensor * inputs  = layers_[il].conv_inputs;
    ggml_tensor * kept =
        ggml_cpy(ctx, x, ggml_view_2d(ctx, inputs, n_channels_, n_nodes, inputs->nb[1], 0)); // for the commit
    ggml_build_forward_expand(graph, kept);

    ggml_tensor * sources[] = { kept, memory_->get_mem_recr()->r_l[il], cells, tree_ };
    return ggml_custom_4d(ctx, GGML_TYPE_F32, conv_width_, n_channels_, n_nodes, 1, sources, 4, ops_.conv_windows,
                          GGML_N_TASKS_MAX, nullptr);
}

ggml_tensor * tree_state::delta_net(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cells, ggml_tensor * q,
                                    ggml_tensor * k, ggml_tensor * v, ggml_tensor * g, ggml_tensor * beta, int il) {
    const int64_t n_nodes = v->ne[2];
    ggml_tensor * both    = ggml_view_1d(ctx, factors_, n_factors_ + n_nodes * n_heads_ * size_, layers_[il].factors);
    both = custom(ctx, both, ops_.delta_net, { q, k, v, g, beta, memory_->get_mem_recr()->s_l[il], cells, tree_ });
    ggml_build_forward_expand(graph, both);
    return ggml_view_4d(ctx, both, size_, n_heads_, n_nodes, 1, size_ * sizeof(float), n_heads_ * size_ * sizeof(float),
                        n_nodes * n_heads_ * size_ * sizeof(float), n_factors_ * sizeof(float));
}

ggml_tensor * tree_state::attn_scores(ggml_context * ctx, ggml_tensor * scores) {
    return arranges_ ? custom(ctx, scores, ops_.scores, { tree_ }) : scores;
}

ggml_tensor * tree_state::attn_values(ggml_context * ctx, ggml_tensor * values, ggml_tensor * weights) {
    if (!arranges_) {
        return ggml_mul_mat(ctx, values, weights);
    }
    ggml_tensor * sources[] = { values, weights, tree_ };
    return ggml_custom_4d(ctx, GGML_TYPE_F32, values->ne[1], weights->ne[1], weights->ne[2], weights->ne[3], sources, 3,
                          ops_.values, GGML_N_TASKS_MAX, nullptr);
}

// keys and values of each attention layer to where plain decoding would have put them
void tree_state::build_commit_of_cache(ggml_context * ctx) {
    const llama_kv_cache & cache = *memory_->get_mem_attn();
    for (const uint32_t il : cache.get_layer_ids()) {
        ggml_tensor * k = cache.get_k_storage((int32_t) il);
        ggml_tensor * v = value_storage(cache, ctx, (int32_t) il);
        ggml_build_forward_expand(commit_graph_, custom(ctx, k, ops_.commit_rows, { moves_ }));
        if (target_->get_cparams().flash_attn) { // else it is stored transposed
            ggml_build_forward_expand(commit_graph_, custom(ctx, v, ops_.commit_rows, { moves_ }));
        } else {
            ggml_tensor * columns = ggml_view_3d(ctx, v, v->ne[1], v->ne[0], v->ne[2], v->ne[1] * v->nb[0], v->nb[2], 0);
            ggml_build_forward_expand(commit_graph_, custom(ctx, columns, ops_.commit_columns, { moves_ }));
        }
    }
}

// one node for the state and one for the conv inputs of each recurrent layer, two for the cache of each attention layer,
// all in place
void tree_state::build_commit(int32_t cell) {
    const llama_memory_recurrent & recurrent = *memory_->get_mem_recr();
    const size_t                   n_nodes   = 5 * layers_.size(); // up to three views and two ops a layer
    commit_tensors_.reset(ggml_init(
        { n_nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_nodes, false), nullptr, /*no_alloc*/ true }));
    ggml_context * ctx = commit_tensors_.get();
    commit_graph_      = ggml_new_graph_custom(ctx, n_nodes, /*grads*/ false);
    commit_cell_       = cell;

    build_commit_of_cache(ctx);
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

// What the cells of the verify hold after their rows were moved: the path first, cell by cell; the others go. Set to
// positions behind it, llama_kv_cache::seq_rm finds them, and moves its head back as no other call does.
void tree_state::rename_cells(int32_t n, const int32_t * path) {
    llama_kv_cache & cache = *memory_->get_mem_attn();
    auto &           cells = const_cast<llama_kv_cells &>(cache.get_cells(0)); // it offers them read-only
    const bool       is_2d = llama_get_model(target_)->hparams.n_pos_per_embd() >= 3;
    for (size_t i = 0; i < cells_.size(); ++i) {
        const uint32_t  cell = (uint32_t) rows_[3 * max_nodes_ + i];
        const llama_pos pos  = pos_ + (llama_pos) i;
        cells.rm(cell);
        cells.pos_set(cell, pos);
        cells.ext_set(cell, { is_2d ? pos : 0, is_2d ? pos : 0, (int32_t) i < n ? tokens_[path[i]] : LLAMA_TOKEN_NULL });
        cells.seq_add(cell, 0);
    }
    if (n < (int32_t) cells_.size()) {
        cache.seq_rm(0, pos_ + n, -1);
    }
}

void tree_state::commit(const int32_t * path, int32_t n) {
    const int32_t tail = cell();
    if (tail != commit_cell_) {
        build_commit(tail);
    }
    ggml_backend_tensor_set(path_, &n, 0, sizeof(n));
    ggml_backend_tensor_set(path_, path, sizeof(n), n * sizeof(int32_t));
    std::vector<int32_t> moves(1, 0);
    for (int32_t k = 0; k < n; ++k) {
        if (path[k] != k) {
            moves[0]++;
            moves.insert(moves.end(), { (int32_t) cells_[path[k]], (int32_t) cells_[k] });
        }
    }
    ggml_backend_tensor_set(moves_, moves.data(), 0, moves.size() * sizeof(int32_t));
    set_n_threads();
    const ggml_status status = ggml_backend_graph_compute(backend_.get(), commit_graph_);
    if (status != GGML_STATUS_SUCCESS) {
        fail(DW_ERR_DECODE, "the commit of %d tokens at position %d failed with ggml status %d", n, pos_, (int) status);
    }
    rename_cells(n, path);
    memory_->get_mem_recr()->cells[tail].pos = pos_ + n - 1;
}

} // namespace draftwood
