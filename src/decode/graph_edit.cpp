// See graph_edit.h.

#include "decode/graph_edit.h"

#include "ggml-impl.h"

#include <algorithm>
#include <cstring>

namespace draftwood {

namespace {

template <typename call_type> void for_each_source(const ggml_tensor * tensor, call_type && call) {
    for (ggml_tensor * source : tensor->src) {
        if (source) {
            call(source);
        }
    }
}

// contiguous
void make_view(ggml_tensor & node, ggml_tensor * of, size_t offset) {
    node.op    = GGML_OP_VIEW;
    node.nb[0] = sizeof(float);
    for (int i = 1; i < GGML_MAX_DIMS; ++i) {
        node.nb[i] = node.nb[i - 1] * (size_t) node.ne[i - 1];
    }
    std::fill(std::begin(node.src), std::end(node.src), nullptr);
    std::fill(std::begin(node.op_params), std::end(node.op_params), 0);
    node.src[0]    = of;
    node.view_src  = of;
    node.view_offs = offset;
    std::memcpy(node.op_params, &offset, sizeof(offset));
}

} // namespace

graph_edit::graph_edit(ggml_cgraph * graph) :
    graph_(graph),
    nodes_(graph->nodes, graph->nodes + graph->n_nodes) {
    for (ggml_tensor * node : nodes_) {
        for_each_source(node, [&](const ggml_tensor * source) {
            std::vector<ggml_tensor *> & known = users_[source];
            if (known.empty() || known.back() != node) {
                known.push_back(node);
            }
        });
    }
}

const std::vector<ggml_tensor *> & graph_edit::users(const ggml_tensor * tensor) const {
    static const std::vector<ggml_tensor *> none;
    const auto                              found = users_.find(tensor);
    return found == users_.end() ? none : found->second;
}

// the results included, the inputs and leafs not
graph_edit::tensors graph_edit::between(const std::vector<ggml_tensor *> &       results,
                                        const std::vector<const ggml_tensor *> & inputs) const {
    tensors                          found(results.begin(), results.end());
    std::vector<const ggml_tensor *> open(results.begin(), results.end());
    while (!open.empty()) {
        const ggml_tensor * node = open.back();
        open.pop_back();
        for_each_source(node, [&](const ggml_tensor * source) {
            const bool is_input = std::find(inputs.begin(), inputs.end(), source) != inputs.end();
            if (!is_input && source->op != GGML_OP_NONE && found.insert(source).second) {
                open.push_back(source);
            }
        });
    }
    return found;
}

bool graph_edit::is_closed(const std::vector<ggml_tensor *> &       results,
                           const std::vector<const ggml_tensor *> & inputs) const {
    const tensors all = between(results, inputs);
    return std::all_of(all.begin(), all.end(), [&](const ggml_tensor * node) {
        if (std::find(results.begin(), results.end(), node) != results.end()) {
            return true;
        }
        const std::vector<ggml_tensor *> & readers = users(node);
        return (node->flags & GGML_TENSOR_FLAG_OUTPUT) == 0 &&
               std::all_of(readers.begin(), readers.end(),
                           [&](const ggml_tensor * user) { return all.count(user) > 0; });
    });
}

void graph_edit::replace(ggml_tensor * result, const std::vector<ggml_tensor *> & ended,
                         const std::vector<const ggml_tensor *> & inputs, const ggml_tensor * made) {
    std::vector<ggml_tensor *> results(ended);
    results.push_back(result);
    tensors gone = between(results, inputs);
    gone.erase(result);
    removed_.insert(gone.begin(), gone.end());
    change to{ result, *result };
    to.to.op        = made->op;
    to.to.view_src  = nullptr;
    to.to.view_offs = 0;
    std::copy(std::begin(made->src), std::end(made->src), to.to.src);
    std::copy(std::begin(made->op_params), std::end(made->op_params), to.to.op_params);
    std::copy(std::begin(made->nb), std::end(made->nb), to.to.nb);
    changes_.push_back(to);
}

void graph_edit::split(const std::vector<ggml_tensor *> & results, const std::vector<ggml_tensor *> & ended,
                       const std::vector<const ggml_tensor *> & inputs, ggml_tensor * made) {
    std::vector<ggml_tensor *> all(results);
    all.insert(all.end(), ended.begin(), ended.end());
    tensors gone = between(all, inputs);
    size_t  at   = 0;
    for (ggml_tensor * result : results) {
        gone.erase(result);
        change to{ result, *result };
        make_view(to.to, made, at);
        changes_.push_back(to);
        at += (size_t) ggml_nelements(result) * sizeof(float);
    }
    removed_.insert(gone.begin(), gone.end());
    const auto first  = std::find_if(nodes_.begin(), nodes_.end(), [&](ggml_tensor * node) {
        return std::find(results.begin(), results.end(), node) != results.end();
    });
    in_front_[*first] = made;
}

void graph_edit::finish() {
    std::vector<ggml_tensor *> order;
    order.reserve(nodes_.size() + in_front_.size());
    for (ggml_tensor * node : nodes_) {
        const auto made = in_front_.find(node);
        if (made != in_front_.end()) {
            order.push_back(made->second);
        }
        if (removed_.count(node) == 0) {
            order.push_back(node);
        }
    }
    for (const auto & [_, made] : in_front_) {
        ggml_build_forward_expand(graph_, made); // makes it known to the graph
    }
    for (const change & each : changes_) {
        *each.node = each.to;
    }
    std::copy(order.begin(), order.end(), graph_->nodes);
    graph_->n_nodes = (int) order.size();
    // a backend fuses nodes by how often they are used
    const auto count_of = [&](const ggml_tensor * of) -> int32_t & {
        return graph_->use_counts[ggml_hash_find(&graph_->visited_hash_set, of)];
    };
    for (ggml_tensor * node : nodes_) {
        count_of(node) = 0;
    }
    for (int i = 0; i < graph_->n_leafs; ++i) {
        count_of(graph_->leafs[i]) = 0;
    }
    for (const ggml_tensor * node : order) {
        for (const ggml_tensor * source : node->src) {
            if (source) {
                count_of(source)++;
            }
        }
    }
}

} // namespace draftwood
