// One look through a graph for the parts of layers. A pattern is a method that is given a node: it returns whether that
// node ends a part, which is then replaced. Patterns are found in the graph as it was; changes are written at the end.
// Test: tests/model/test_fused_layers.py.

#pragma once

#include "decode/cached_heads.h"
#include "decode/fused_layers.h"
#include "decode/graph_edit.h"
#include "decode/pattern.h"
#include "ggml-backend.h"
#include "ops/door/node.h"
#include "ops/layer-parts/layer-parts.h"

#include <array>
#include <initializer_list>
#include <unordered_map>

namespace draftwood {

namespace parts = dw::layer_parts;

// Products with these weights take activations of 8 bits.
inline bool is_quantised(const ggml_tensor * weights) {
    return parts::is_product_type(weights->type) && !parts::is_float(weights->type) &&
           parts::is_product_width(weights->type, weights->ne[0]);
}

class fuser {
  public:
    fuser(ggml_context * ctx, ggml_cgraph * graph, const graph_results & results, bool on_cpu) :
        ctx_(ctx),
        edit_(graph, results.kept),
        logits_(results.logits),
        on_cpu_(on_cpu) {}

    fused_counts run();

  private:
    void count(fused_part which, bool found) { counts_[which] += found ? 1 : 0; }

    // A node of the op for the device of these weights; nullptr: it cannot run there.
    ggml_tensor * made(const dw::op_signature & op, std::array<int64_t, GGML_MAX_DIMS> ne,
                       std::initializer_list<dw::operand> operands, std::initializer_list<ggml_tensor *> weights,
                       const parts::settings & with, ggml_type type = GGML_TYPE_F32);

    // nodes of parts that have several patterns
    ggml_tensor * made_inputs(const norm & normal, const std::vector<ggml_tensor *> & products);
    ggml_tensor * made_heads(const turned_heads & q, const turned_heads & k, ggml_tensor * v, int32_t v_hadamard,
                             const ggml_tensor * shape, const cache_write & keys, const cache_write & values);

    // false: there is no node
    bool replace(ggml_tensor * result, const std::vector<const ggml_tensor *> & inputs, const ggml_tensor * node,
                 const std::vector<ggml_tensor *> & ended = {});
    bool split(const std::vector<ggml_tensor *> & results, const std::vector<const ggml_tensor *> & inputs,
               ggml_tensor * node, const std::vector<ggml_tensor *> & ended = {});

    bool split_products(const norm & normal, const std::vector<ggml_tensor *> & products);

    void find_trees();
    // the tree on a cache's device, or another's copy; nullptr: the graph is no verify
    ggml_tensor * tree_for(ggml_tensor * cache) const;

    static bool has_few_rows(const ggml_tensor * x) { return x->ne[1] <= parts::max_rows && ggml_is_matrix(x); }

    struct expert_layer;
    ggml_tensor * guess_beside(const expert_layer & of, const ggml_tensor * slots) const;
    bool          reads_alone(const expert_layer & of, const ggml_tensor * indices) const;
    ggml_tensor * choice_of(const expert_layer & of, const ggml_tensor * guess);
    ggml_tensor * networks_of(const expert_layer & of, ggml_tensor * choice, ggml_tensor * indices,
                              std::array<uint8_t, 2> planes);

    bool experts(ggml_tensor * sum);
    bool pooled_experts(const expert_layer & of, ggml_tensor * indices, std::array<uint8_t, 2> planes);
    bool feed_forward(ggml_tensor * sum);
    bool delta_inputs(ggml_tensor * scaled);
    bool attention_inputs(ggml_tensor * scaled);
    bool attention_heads(ggml_tensor * scaled);
    bool delta_front(ggml_tensor * convolved);
    bool delta_heads(ggml_tensor * convolved);
    bool delta_tree(ggml_tensor * convolved);
    bool delta_step(ggml_tensor * rule);
    bool delta_output(ggml_tensor * sum);
    bool flash_attention(ggml_tensor * node);
    bool attention_output(ggml_tensor * sum);
    bool draft_input(ggml_tensor * node);
    int  feature_keys(ggml_tensor * scaled);
    bool product(ggml_tensor * node);
    bool norm_of_head(ggml_tensor * node);

    ggml_context *      ctx_;
    graph_edit          edit_;
    const ggml_tensor * logits_;
    bool                on_cpu_;
    fused_counts        counts_{};

    std::vector<ggml_tensor *> trees_; // of a verify, on each device

    // By y: the array that holds y and, behind it, what the output's product reads. Of delta_step and flash_attention.
    std::unordered_map<const ggml_tensor *, ggml_tensor *> ahead_;
};

} // namespace draftwood
