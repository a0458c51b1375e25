// Factors of a verify and their commit: see tree_state.h.

#include "verify/tree_state.h"

#include "llama/backends.h"
#include "llama/facts.h"
#include "llama/status.h"
#include "llama/tensor_bytes.h"
#include "ops/tree-delta-net/tree-factors.h"
#include "verify/attention_mask.h"

#include <algorithm>

namespace draftwood {

namespace {

bool has_ops(llama_context * ctx, const ggml_tensor * t) {
    ggml_backend_t backend = backend_of(ctx, t);
    return backend && find_tree_ops(ggml_backend_get_device(backend));
}

} // namespace

// why no draft trees can be verified in a context; empty: they can
std::string tree_state::refusal(llama_context * target) {
    const auto memory = hybrid_memory::of(target);
    if (!is_qwen35(architecture(llama_get_model(target))) || !memory) {
        return "trees are verified on qwen35 and qwen35moe";
    }
    if (!has_fused_delta_net(target)) {
        return "the context runs the delta net without its fused op";
    }
    if (!cpu_backend(target)) {
        return "the context has no CPU backend";
    }
    const int64_t size = delta_net_of(llama_get_model(target)).size;
    for (const auto & layer : memory->recurrent_layers()) {
        if (!is_on_host(layer.states) && !dw::is_state_size(size)) {
            return "its delta net has heads of " + std::to_string(size) + " values; GPUs take 16, 32, 64 and 128";
        }
        for (const ggml_tensor * state : { layer.states, layer.conv_states }) {
            if (!has_ops(target, state) || state->type != GGML_TYPE_F32) {
                return "the state of layer " + std::to_string(layer.il) + " is on a device without the tree ops";
            }
        }
    }
    for (const auto & layer : memory->attention_layers()) {
        if (!has_ops(target, layer.keys)) {
            return "the KV cache of layer " + std::to_string(layer.il) + " is on a device without the tree ops";
        }
    }
    return "";
}

std::unique_ptr<tree_state> tree_state::make(llama_context * target, int32_t max_rows, budget_share & share,
                                             std::string & why_not) {
    why_not = refusal(target);
    if (!why_not.empty()) {
        return nullptr;
    }
    return std::unique_ptr<tree_state>(new tree_state(target, *hybrid_memory::of(target), max_rows, share));
}

tree_state::tree_state(llama_context * target, const hybrid_memory & memory, int32_t max_rows, budget_share & share) :
    target_(target),
    memory_(memory),
    max_rows_((int32_t) GGML_PAD(max_rows, 8)) { // keeps each layer's factors aligned
    make_devices(share);
}

void tree_state::make_devices(budget_share & share) {
    const delta_net_sizes sizes = delta_net_of(llama_get_model(target_));
    const tree_shape      shape{
        sizes.size, sizes.n_heads, sizes.n_key_heads, sizes.n_channels, sizes.conv_width, max_rows_
    };

    std::map<ggml_backend_t, tree_device::residents> homes;
    for (const auto & layer : memory_.recurrent_layers()) {
        homes[backend_of(target_, layer.states)].layers[layer.il] = { layer.states, layer.conv_states };
    }
    for (const auto & layer : memory_.attention_layers()) {
        auto & caches = homes[backend_of(target_, layer.keys)].caches;
        caches.push_back({ layer.keys, false });
        caches.push_back({ layer.values, layer.transposed });
    }
    for (auto & [backend, here] : homes) {
        const tree_op_set & ops = *find_tree_ops(ggml_backend_get_device(backend));
        devices_.push_back(std::make_unique<tree_device>(backend, ops, shape, std::move(here), share));
    }
}

tree_device & tree_state::device_of(int32_t il) {
    const auto here = [&](const auto & each) { return each->has(il); };
    return **std::find_if(devices_.begin(), devices_.end(), here);
}

void tree_state::finish() const {
    for (const auto & each : devices_) {
        each->finish();
    }
}

bool tree_state::ready(llama_seq_id seq) const {
    return memory_.has_own_state(seq);
}

bool tree_state::holds(llama_seq_id seq, llama_pos n_tokens) const {
    return ready(seq) && memory_.state_pos(seq) == n_tokens - 1;
}

void tree_state::begin(const std::vector<planned_tree> & trees, int32_t n_rows, bool exact) {
    for (const planned_tree & each : trees) {
        for (const auto & device : devices_) {
            device->prepare_commit(memory_.state_cell(each.seq));
        }
        // llama_memory_recurrent warns of positions that are not one further than the last
        memory_.set_state_pos(each.seq, each.pos + each.tree->height() - n_rows);
    }
    plan_                = plan_verify(trees, n_rows);
    plan_.n_stream_cells = memory_.n_kv_cells();
    pack_rows();
    const bool on_host =
        std::all_of(devices_.begin(), devices_.end(), [](const auto & each) { return each->is_host(); });
    arranges_ = plan_.branches && exact && on_host && !has_flash_attention(target_);
}

// Memory for what placed() writes is there from begin() on: placed() must not throw.
void tree_state::pack_rows() {
    plan_.cells.reserve(plan_.n_rows());
    packed_.assign(4 * (size_t) max_rows_, 0);
    std::copy(plan_.parents.begin(), plan_.parents.end(), packed_column(0));
    std::copy(plan_.depths.begin(), plan_.depths.end(), packed_column(1));
    std::copy(plan_.preorder.begin(), plan_.preorder.end(), packed_column(2));
}

// Rows of a tree do not see their siblings. Where their scores are arranged, they lie as in plain decoding.
void tree_state::placed(const placed_rows & rows) noexcept {
    memory_.put_home();
    plan_.cells.assign(rows.cells, rows.cells + rows.n);
    for (int32_t i = 0; i < plan_.n_rows(); ++i) {
        packed_column(3)[i] = plan_.stream_cell(i);
    }
    for (const auto & each : devices_) {
        each->set_tree(packed_);
    }
    const int32_t n_rows = plan_.branches ? plan_.n_rows() : 0;
    for (int32_t i = 0; i < n_rows; ++i) {
        const int32_t first = i / plan_.n_each * plan_.n_each;
        for (int32_t j = 0; j < plan_.n_each; ++j) {
            const bool visible = arranges_ ? j <= plan_.depths[i] : plan_.sees(i, j);
            set_visible(rows.kq_mask, i, plan_.stream_cell(first + j), visible);
        }
    }
}

ggml_tensor * tree_state::conv_input(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cells, ggml_tensor * x,
                                     int il) {
    return device_of(il).conv_input(ctx, graph, cells, x, il);
}

ggml_tensor * tree_state::delta_net(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * cells, ggml_tensor * q,
                                    ggml_tensor * k, ggml_tensor * v, ggml_tensor * g, ggml_tensor * beta, int il) {
    return device_of(il).delta_net(ctx, graph, cells, q, k, v, g, beta, il);
}

ggml_tensor * tree_state::attn_scores(ggml_context * ctx, ggml_tensor * scores) {
    return arranges_ ? devices_[0]->attn_scores(ctx, scores) : scores;
}

ggml_tensor * tree_state::attn_values(ggml_context * ctx, ggml_tensor * values, ggml_tensor * weights) {
    return arranges_ ? devices_[0]->attn_values(ctx, values, weights) : ggml_mul_mat(ctx, values, weights);
}

} // namespace draftwood
