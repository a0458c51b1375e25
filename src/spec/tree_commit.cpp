// The commit of a path of the last verify: see tree_state.h.

#include "llama-context.h"
#include "llama-memory-hybrid.h"
#include "llama-model.h"
#include "status.h"
#include "tree_state.h"

#include <algorithm>

namespace draftwood {

namespace {

// the cache's tensor of values in layer il [n_embd, kv_size, n_streams]; the cache itself only offers views
ggml_tensor * value_storage(const llama_kv_cache & cache, ggml_context * ctx, int32_t il) {
    llama_kv_cache::slot_info whole{ 0, 0, {}, {} };
    return cache.get_v(ctx, il, 1, whole)->view_src;
}

} // namespace

// keys and values of each attention layer to where plain decoding would have put them
void tree_state::build_commit_of_cache(commit_graph & commit) {
    ggml_context *         ctx   = commit.tensors.get();
    const llama_kv_cache & cache = *memory_->get_mem_attn();
    for (const uint32_t il : cache.get_layer_ids()) {
        ggml_tensor * k = cache.get_k_storage((int32_t) il);
        ggml_tensor * v = value_storage(cache, ctx, (int32_t) il);
        ggml_build_forward_expand(commit.graph, custom_in_place(ctx, k, ops_.commit_rows, { moves_ }));
        if (target_->get_cparams().flash_attn) { // else it is stored transposed
            ggml_build_forward_expand(commit.graph, custom_in_place(ctx, v, ops_.commit_rows, { moves_ }));
        } else {
            ggml_tensor * columns =
                ggml_view_3d(ctx, v, v->ne[1], v->ne[0], v->ne[2], v->ne[1] * v->nb[0], v->nb[2], 0);
            ggml_build_forward_expand(commit.graph, custom_in_place(ctx, columns, ops_.commit_columns, { moves_ }));
        }
    }
}

// one node for the state and one for the conv inputs of each recurrent layer, two for the cache of each attention
// layer, all in place
tree_state::commit_graph & tree_state::commit_of(int32_t cell) {
    commit_graph & commit = commits_[cell];
    if (commit.graph) {
        return commit;
    }
    const llama_memory_recurrent & recurrent = *memory_->get_mem_recr();
    const size_t                   n_nodes   = 5 * layers_.size(); // up to three views and two ops a layer
    commit.tensors.reset(ggml_init(
        { n_nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_nodes, false), nullptr, /*no_alloc*/ true }));
    ggml_context * ctx = commit.tensors.get();
    commit.graph       = ggml_new_graph_custom(ctx, n_nodes, /*grads*/ false);
    build_commit_of_cache(commit);
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
        ggml_build_forward_expand(commit.graph, custom_in_place(ctx, state, ops_.commit_state, { factors, path_ }));
        ggml_build_forward_expand(commit.graph,
                                  custom_in_place(ctx, conv, ops_.commit_conv, { layers_[il].conv_inputs, path_ }));
    }
    return commit;
}

void tree_state::set_n_threads() {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend_.get()));
    auto set = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    if (set) {
        set(backend_.get(), (int) llama_n_threads(target_));
    }
}

// What the cells of a sequence hold after its rows were moved: the path first, cell by cell; the others go. Set to
// positions behind it, llama_kv_cache::seq_rm finds them, and moves its head back as no other call does.
void tree_state::rename_cells(const open_rows & rows, const std::vector<int32_t> & path) {
    llama_kv_cache & cache = *memory_->get_mem_attn();
    auto &           cells = const_cast<llama_kv_cells &>(cache.get_cells(rows.seq)); // it offers them read-only
    const bool       is_2d = llama_get_model(target_)->hparams.n_pos_per_embd() >= 3;
    const int32_t    n     = (int32_t) path.size();
    for (int32_t i = 0; i < n_each_; ++i) {
        const uint32_t    cell  = (uint32_t) tree_column(3)[rows.first + i];
        const llama_pos   pos   = rows.pos + i;
        const llama_token token = i < n ? tokens_[rows.first + path[i]] : LLAMA_TOKEN_NULL;
        cells.rm(cell);
        cells.pos_set(cell, pos);
        cells.ext_set(cell, { is_2d ? pos : 0, is_2d ? pos : 0, token });
        cells.seq_add(cell, rows.seq);
    }
    if (n < n_each_) {
        cache.seq_rm(rows.seq, rows.pos + n, -1);
    }
}

void tree_state::commit(llama_seq_id seq, const std::vector<int32_t> & path) {
    const auto rows = std::find_if(open_.begin(), open_.end(), [&](const open_rows & each) { return each.seq == seq; });
    if (rows == open_.end()) {
        fail(DW_ERR_INTERNAL, "a commit of sequence %d, which the last verify did not hold", seq);
    }
    const int32_t        tail = cell(seq);
    std::vector<int32_t> applied(1, (int32_t) path.size()), moves(1, 0);
    for (size_t k = 0; k < path.size(); ++k) {
        applied.push_back(rows->first + path[k]);
        if (path[k] != (int32_t) k) {
            moves[0]++;
            moves.push_back((int32_t) cells_[rows->first + path[k]]);
            moves.push_back((int32_t) cells_[rows->first + k]);
        }
    }
    ggml_backend_tensor_set(path_, applied.data(), 0, applied.size() * sizeof(int32_t));
    ggml_backend_tensor_set(moves_, moves.data(), 0, moves.size() * sizeof(int32_t));
    set_n_threads();
    const ggml_status status = ggml_backend_graph_compute(backend_.get(), commit_of(tail).graph);
    if (status != GGML_STATUS_SUCCESS) {
        fail(DW_ERR_DECODE, "the commit of %zu tokens at position %d failed with ggml status %d", path.size(),
             rows->pos, (int) status);
    }
    rename_cells(*rows, path);
    memory_->get_mem_recr()->cells[tail].pos = rows->pos + (llama_pos) path.size() - 1;
}

} // namespace draftwood
