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

ggml_custom_op_t find_op(ggml_backend_dev_t dev, const char * name) {
    return (ggml_custom_op_t) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dev), name);
}

bool on_cpu(const ggml_tensor * t) {
    return !t || ggml_backend_buffer_is_host(t->buffer);
}

// why no draft trees can be verified in a context; empty: they can
std::string refusal(llama_context * target) {
    const llm_arch arch   = llama_get_model(target)->arch;
    const auto *   memory = dynamic_cast<const llama_memory_hybrid *>(llama_get_memory(target));
    if ((arch != LLM_ARCH_QWEN35 && arch != LLM_ARCH_QWEN35MOE) || !memory) {
        return "trees are verified on qwen35 and qwen35moe";
    }
    if (!target->get_cparams().fused_gdn_ar || !target->get_cparams().fused_gdn_ch) {
        return "the context runs the delta net without its fused op";
    }
    if (!dw_cpu_backend(target)) {
        return "the context has no CPU backend";
    }
    const llama_memory_recurrent & recurrent = *memory->get_mem_recr();
    for (size_t il = 0; il < recurrent.s_l.size(); ++il) {
        for (const ggml_tensor * state : { recurrent.s_l[il], recurrent.r_l[il] }) {
            if (!on_cpu(state) || (state && state->type != GGML_TYPE_F32)) {
                return "the state of layer " + std::to_string(il) + " is on a device without the tree ops";
            }
        }
    }
    for (const uint32_t il : memory->get_mem_attn()->get_layer_ids()) {
        if (!on_cpu(memory->get_mem_attn()->get_k_storage((int32_t) il))) {
            return "the KV cache of layer " + std::to_string(il) + " is on a device without the tree ops";
        }
    }
    return "";
}

} // namespace

std::unique_ptr<tree_state> tree_state::make(llama_context * target, int32_t max_rows, std::string & why_not) {
    why_not = refusal(target);
    if (!why_not.empty()) {
        return nullptr;
    }
    ggml_backend_dev_t cpu   = ggml_backend_get_device(dw_cpu_backend(target));
    const ops          found = { find_op(cpu, "dw_tree_conv_windows"), find_op(cpu, "dw_tree_delta_net"),
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
    auto * memory = static_cast<llama_memory_hybrid *>(llama_get_memory(target));
    return std::unique_ptr<tree_state>(new tree_state(target, memory, std::move(backend), found, max_rows));
}

tree_state::tree_state(llama_context * target, llama_memory_hybrid * memory, ggml_backend_ptr backend,
                       const ops & found, int32_t max_rows) :
    target_(target),
    memory_(memory),
    backend_(std::move(backend)),
    ops_(found),
    max_rows_((int32_t) GGML_PAD(max_rows, 8)) { // keeps each layer's factors aligned
    const llama_hparams & hparams = llama_get_model(target)->hparams;
    size_                         = hparams.ssm_d_state;
    n_heads_                      = hparams.ssm_dt_rank;
    n_key_heads_                  = hparams.ssm_n_group;
    n_channels_                   = hparams.ssm_d_inner + 2 * n_key_heads_ * size_;
    conv_width_                   = hparams.ssm_d_conv;
    n_factors_                    = max_rows_ * (n_key_heads_ * size_ + n_heads_ * size_ + n_heads_);
    allocate();
}

void tree_state::allocate() {
    const auto & states = memory_->get_mem_recr()->s_l;
    tensors_.reset(ggml_init({ (states.size() + 5) * ggml_tensor_overhead(), nullptr, /*no_alloc*/ true }));

    int64_t n_used = 0;
    layers_.resize(states.size());
    for (size_t il = 0; il < states.size(); ++il) {
        if (states[il]) {
            layers_[il].conv_inputs = ggml_new_tensor_2d(tensors_.get(), GGML_TYPE_F32, n_channels_, max_rows_);
            layers_[il].factors     = n_used * sizeof(float);
            n_used += n_factors_;
        }
    }
    // An op has one output, so a layer's follows its factors, where the next layer's begin: by then it was consumed.
    factors_ = ggml_new_tensor_1d(tensors_.get(), GGML_TYPE_F32, n_used + max_rows_ * n_heads_ * size_);
    tree_    = ggml_new_tensor_2d(tensors_.get(), GGML_TYPE_I32, max_rows_, 4);
    path_    = ggml_new_tensor_1d(tensors_.get(), GGML_TYPE_I32, 1 + max_rows_);
    moves_   = ggml_new_tensor_1d(tensors_.get(), GGML_TYPE_I32, 1 + 2 * max_rows_);
    buffer_.reset(ggml_backend_alloc_ctx_tensors(tensors_.get(), backend_.get()));
    if (!buffer_) {
        fail(DW_ERR_MEMORY, "no memory for the factors of %d draft tokens", max_rows_);
    }
}

int32_t tree_state::cell(llama_seq_id seq) const {
    const auto & cells = memory_->get_mem_recr()->cells;
    return (size_t) seq < cells.size() ? cells[seq].tail : -1;
}

bool tree_state::ready(llama_seq_id seq) const {
    const llama_memory_recurrent & recurrent = *memory_->get_mem_recr();
    const int32_t                  tail      = cell(seq);
    return tail >= 0 && recurrent.cells[tail].src == tail && recurrent.cells[tail].seq_id.size() == 1 &&
           (recurrent.rs_idx.empty() || recurrent.rs_idx[seq] == 0);
}

// llama_memory_recurrent swaps cells until those of a ubatch are neighbours, and copies states in its graph then;
// llama_batch_allocr splits sequences that are none where each has a stream of its own.
bool tree_state::ready(const std::vector<llama_seq_id> & sequences) const {
    for (size_t i = 0; i < sequences.size(); ++i) {
        const int32_t n = (int32_t) i;
        if (!ready(sequences[i]) || cell(sequences[i]) != cell(sequences[0]) + n || sequences[i] != sequences[0] + n) {
            return false;
        }
    }
    return true;
}

bool tree_state::holds(llama_seq_id seq, llama_pos n_tokens) const {
    return ready(seq) && memory_->get_mem_recr()->cells[cell(seq)].pos == n_tokens - 1;
}

void tree_state::set_tree(const token_tree & tree, int32_t first, int32_t n_rows) {
    int32_t * parents  = tree_column(0);
    int32_t * depths   = tree_column(1);
    int32_t * preorder = tree_column(2) + first;
    for (int32_t i = 0; i < n_rows; ++i) {
        const int32_t node   = std::min(i, tree.size() - 1);
        const int32_t parent = tree.parents[node];
        tokens_[first + i]   = tree.tokens[node];
        parents[first + i]   = parent < 0 ? -1 : first + parent;
        depths[first + i]    = tree.depths[node];
        ancestors_.push_back((parent < 0 ? 0 : ancestors_[first + parent]) | uint64_t(1) << i);
    }
    std::vector<int32_t> open;
    const auto           push_children = [&](int32_t parent) {
        for (int32_t row = first + n_rows - 1; row >= std::max(parent, first); --row) {
            if (parents[row] == parent) {
                open.push_back(row);
            }
        }
    };
    push_children(-1); // where the tree is its root alone, copies of it are roots, too
    for (int32_t o = 0; !open.empty(); ++o) {
        const int32_t row = preorder[o] = open.back();
        open.pop_back();
        push_children(row);
    }
}

void tree_state::begin(const std::vector<member> & members, int32_t n_rows, bool exact) {
    n_each_ = n_rows;
    rows_.assign(4 * (size_t) max_rows_, 0);
    tokens_.resize(members.size() * n_rows);
    ancestors_.clear();
    cells_.clear();
    open_.clear();
    branches_ = false;
    for (const member & each : members) {
        const int32_t first = (int32_t) open_.size() * n_rows;
        open_.push_back({ each.seq, each.pos, first });
        set_tree(*each.tree, first, n_rows);
        branches_ = branches_ || n_rows > each.tree->size() || !each.tree->is_chain();
        // llama_memory_recurrent warns of positions that are not one further than the last
        memory_->get_mem_recr()->cells[cell(each.seq)].pos = each.pos + each.tree->height() - n_rows;
    }
    arranges_ = branches_ && exact && !target_->get_cparams().flash_attn;
}

void tree_state::undo() {
    for (const open_rows & each : open_) {
        memory_->get_mem_attn()->seq_rm(each.seq, each.pos, -1);
        memory_->get_mem_recr()->cells[cell(each.seq)].pos = each.pos - 1;
    }
}

// Rows of a tree do not see their siblings. Where their scores are arranged, they lie as in plain decoding.
void tree_state::placed(const dw_placed_rows & rows) noexcept {
    const int64_t kv_size = memory_->get_mem_attn()->get_size();
    cells_.assign(rows.cells, rows.cells + rows.n);
    int32_t * cells = tree_column(3);
    for (int64_t i = 0; i < rows.n; ++i) {
        cells[i] = (int32_t) (cells_[i] % kv_size);
    }
    ggml_backend_tensor_set(tree_, rows_.data(), 0, rows_.size() * sizeof(int32_t));
    for (int64_t i = 0; branches_ && i < rows.n; ++i) {
        const int64_t first = i / n_each_ * n_each_;
        for (int64_t j = 0; j < n_each_; ++j) {
            const bool visible = arranges_ ? j <= tree_column(1)[i] : (ancestors_[i] >> j & 1) != 0;
            set_visible(rows.kq_mask, i, cells[first + j], visible);
        }
    }
}

ggml_tensor * tree_state::conv_input(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cells, ggml_tensor * x,
                                     int il) {
    const int64_t n_rows = x->ne[1] * x->ne[2];
    ggml_tensor * inputs = layers_[il].conv_inputs;
    ggml_tensor * kept   = ggml_cpy(ctx, ggml_reshape_2d(ctx, x, n_channels_, n_rows), // for the commit
                                    ggml_view_2d(ctx, inputs, n_channels_, n_rows, inputs->nb[1], 0));
    ggml_build_forward_expand(graph, kept);

    ggml_tensor * sources[] = { kept, memory_->get_mem_recr()->r_l[il], cells, tree_ };
    return ggml_custom_4d(ctx, GGML_TYPE_F32, conv_width_, n_channels_, n_rows, 1, sources, 4, ops_.conv_windows,
                          GGML_N_TASKS_MAX, nullptr);
}

ggml_tensor * tree_state::delta_net(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cells, ggml_tensor * q,
                                    ggml_tensor * k, ggml_tensor * v, ggml_tensor * g, ggml_tensor * beta, int il) {
    const int64_t n_nodes = v->ne[2];
    const int64_t n_seqs  = v->ne[3];
    const int64_t n_out   = n_nodes * n_seqs * n_heads_ * size_;
    ggml_tensor * both    = ggml_view_1d(ctx, factors_, n_factors_ + n_out, layers_[il].factors);
    both                  = custom_in_place(ctx, both, ops_.delta_net,
                                            { q, k, v, g, beta, memory_->get_mem_recr()->s_l[il], cells, tree_ });
    ggml_build_forward_expand(graph, both);
    return ggml_view_4d(ctx, both, size_, n_heads_, n_nodes, n_seqs, size_ * sizeof(float),
                        n_heads_ * size_ * sizeof(float), n_nodes * n_heads_ * size_ * sizeof(float),
                        n_factors_ * sizeof(float));
}

ggml_tensor * tree_state::attn_scores(ggml_context * ctx, ggml_tensor * scores) {
    return arranges_ ? custom_in_place(ctx, scores, ops_.scores, { tree_ }) : scores;
}

ggml_tensor * tree_state::attn_values(ggml_context * ctx, ggml_tensor * values, ggml_tensor * weights) {
    if (!arranges_) {
        return ggml_mul_mat(ctx, values, weights);
    }
    ggml_tensor * sources[] = { values, weights, tree_ };
    return ggml_custom_4d(ctx, GGML_TYPE_F32, values->ne[1], weights->ne[1], weights->ne[2], weights->ne[3], sources, 3,
                          ops_.values, GGML_N_TASKS_MAX, nullptr);
}

} // namespace draftwood
