// Factors of a verify and their commit: see tree_state.h.

#include "verify/tree_state.h"

#include "llama/backends.h"
#include "llama/facts.h"
#include "llama/status.h"
#include "verify/row_mask.h"

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
    const std::string arch   = architecture(llama_get_model(target));
    const auto        memory = hybrid_memory::of(target);
    if ((arch != "qwen35" && arch != "qwen35moe") || !memory) {
        return "trees are verified on qwen35 and qwen35moe";
    }
    if (!has_fused_delta_net(target)) {
        return "the context runs the delta net without its fused op";
    }
    if (!cpu_backend(target)) {
        return "the context has no CPU backend";
    }
    for (const auto & layer : memory->recurrent_layers()) {
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

std::unique_ptr<tree_state> tree_state::make(llama_context * target, int32_t max_rows, std::string & why_not) {
    why_not = refusal(target);
    if (!why_not.empty()) {
        return nullptr;
    }
    return std::unique_ptr<tree_state>(new tree_state(target, *hybrid_memory::of(target), max_rows));
}

tree_state::tree_state(llama_context * target, const hybrid_memory & memory, int32_t max_rows) :
    target_(target),
    memory_(memory),
    max_rows_((int32_t) GGML_PAD(max_rows, 8)) { // keeps each layer's factors aligned
    make_devices();
}

void tree_state::make_devices() {
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
        devices_.push_back(std::make_unique<tree_device>(backend, ops, shape, std::move(here)));
    }
}

tree_device & tree_state::device_of(int32_t il) {
    const auto here = [&](const auto & each) { return each->has(il); };
    return **std::find_if(devices_.begin(), devices_.end(), here);
}

size_t tree_state::bytes() const {
    size_t sum = 0;
    for (const auto & each : devices_) {
        sum += each->bytes();
    }
    return sum;
}

void tree_state::finish() const {
    for (const auto & each : devices_) {
        each->finish();
    }
}

bool tree_state::ready(llama_seq_id seq) const {
    return memory_.has_own_state(seq);
}

// llama_batch_allocr splits sequences whose numbers do not follow each other where each has a stream of its own.
bool tree_state::ready(const std::vector<llama_seq_id> & sequences) const {
    for (size_t i = 0; i < sequences.size(); ++i) {
        if (!ready(sequences[i]) || sequences[i] != sequences[0] + (int32_t) i) {
            return false;
        }
    }
    return memory_.are_in_order(sequences);
}

bool tree_state::holds(llama_seq_id seq, llama_pos n_tokens) const {
    return ready(seq) && memory_.state_pos(seq) == n_tokens - 1;
}

void tree_state::set_tree(const token_tree & tree, int32_t first, int32_t n_rows) {
    int32_t * parents  = tree_column(0);
    int32_t * depths   = tree_column(1);
    int32_t * preorder = tree_column(2) + first;
    for (int32_t i = 0; i < n_rows; ++i) {
        const int32_t node   = std::min(i, tree.size() - 1);
        const int32_t parent = tree.parents[node];
        parents[first + i]   = parent < 0 ? -1 : first + parent;
        depths[first + i]    = tree.depths[node];
        ancestors_.push_back((parent < 0 ? 0 : ancestors_[first + parent]) | uint64_t(1) << i);
    }
    std::vector<int32_t> sizes(n_rows, 1); // of the subtrees
    for (int32_t i = n_rows - 1; i >= 0; --i) {
        if (parents[first + i] >= 0) {
            sizes[parents[first + i] - first] += sizes[i];
        }
    }
    std::vector<int32_t> open;
    // the largest subtree is walked last: fewest states wait for a later child (src/ops/tree-delta-net/tree-plan.h)
    const auto push_children = [&](int32_t parent) {
        const auto begin = (std::ptrdiff_t) open.size();
        for (int32_t row = first + n_rows - 1; row >= std::max(parent, first); --row) {
            if (parents[row] == parent) {
                open.push_back(row);
            }
        }
        std::stable_sort(open.begin() + begin, open.end(),
                         [&](int32_t a, int32_t b) { return sizes[a - first] > sizes[b - first]; });
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
    ancestors_.clear();
    cells_.clear();
    open_.clear();
    branches_ = false;
    for (const member & each : members) {
        for (const auto & device : devices_) {
            device->prepare_commit(memory_.state_cell(each.seq));
        }
        const int32_t first = (int32_t) open_.size() * n_rows;
        open_.push_back({ each.seq, each.pos, first });
        set_tree(*each.tree, first, n_rows);
        branches_ = branches_ || n_rows > each.tree->size() || !each.tree->is_chain();
        // llama_memory_recurrent warns of positions that are not one further than the last
        memory_.set_state_pos(each.seq, each.pos + each.tree->height() - n_rows);
    }
    const bool on_host =
        std::all_of(devices_.begin(), devices_.end(), [](const auto & each) { return each->is_host(); });
    arranges_ = branches_ && exact && on_host && !has_flash_attention(target_);
}

// Rows of a tree do not see their siblings. Where their scores are arranged, they lie as in plain decoding.
void tree_state::placed(const placed_rows & rows) noexcept {
    const int64_t kv_size = memory_.n_kv_cells();
    cells_.assign(rows.cells, rows.cells + rows.n);
    int32_t * cells = tree_column(3);
    for (int64_t i = 0; i < rows.n; ++i) {
        cells[i] = (int32_t) (cells_[i] % kv_size);
    }
    for (const auto & each : devices_) {
        each->set_tree(rows_);
    }
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
