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

bool is_view(const ggml_tensor * node) {
    return node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_PERMUTE ||
           node->op == GGML_OP_TRANSPOSE;
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

graph_edit::graph_edit(ggml_cgraph * graph, const std::vector<const ggml_tensor *> & kept) :
    graph_(graph),
    nodes_(graph->nodes, graph->nodes + graph->n_nodes),
    kept_(kept.begin(), kept.end()) {
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

ggml_tensor * graph_edit::only_user(const ggml_tensor * tensor) const {
    const std::vector<ggml_tensor *> & readers = users(tensor);
    return readers.size() == 1 ? readers[0] : nullptr;
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

bool graph_edit::is_held(const ggml_tensor * node) const {
    return (node->flags & GGML_TENSOR_FLAG_OUTPUT) != 0 || kept_.count(node) > 0;
}

bool graph_edit::may_go(const ggml_tensor * node, const tensors & together) const {
    const std::vector<ggml_tensor *> & readers = users(node);
    return !is_held(node) && std::all_of(readers.begin(), readers.end(),
                                         [&](const ggml_tensor * user) { return together.count(user) > 0; });
}

bool graph_edit::is_closed(const std::vector<ggml_tensor *> &       results,
                           const std::vector<const ggml_tensor *> & inputs) const {
    const tensors all = between(results, inputs);
    return std::all_of(all.begin(), all.end(), [&](const ggml_tensor * node) {
        const bool is_result = std::find(results.begin(), results.end(), node) != results.end();
        return removed_.count(node) == 0 && changed_.count(node) == 0 && (is_result || may_go(node, all));
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
    changed_.insert(result);
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
        changed_.insert(result);
        at += (size_t) ggml_nelements(result) * sizeof(float);
    }
    removed_.insert(gone.begin(), gone.end());
    const auto first  = std::find_if(nodes_.begin(), nodes_.end(), [&](ggml_tensor * node) {
        return std::find(results.begin(), results.end(), node) != results.end();
    });
    in_front_[*first] = made;
}

const ggml_tensor * graph_edit::array_of(const ggml_tensor * result) const {
    const auto found =
        std::find_if(changes_.begin(), changes_.end(), [&](const change & each) { return each.node == result; });
    return found == changes_.end() ? nullptr : found->to.view_src;
}

bool graph_edit::postpone(ggml_tensor * node, const std::vector<ggml_tensor *> & others,
                          const std::vector<const ggml_tensor *> & inputs) {
    std::unordered_map<const ggml_tensor *, size_t> places;
    for (size_t i = 0; i < nodes_.size(); ++i) {
        places[nodes_[i]] = i;
    }
    size_t first = nodes_.size(), last = 0;
    for (const ggml_tensor * other : others) {
        first = std::min(first, places.at(other));
        last  = std::max(last, places.at(other));
    }
    const auto is_late  = [&](const ggml_tensor * reader) { return places.at(reader) > last; };
    const auto is_early = [&](const ggml_tensor * input) {
        return places.count(input) == 0 || places.at(input) < last;
    };
    const auto is_idle = [&](const ggml_tensor * between) {
        return is_view(between) || std::find(others.begin(), others.end(), between) != others.end();
    };
    const std::vector<ggml_tensor *> & readers = users(node);
    if (!std::all_of(readers.begin(), readers.end(), is_late) || !std::all_of(inputs.begin(), inputs.end(), is_early) ||
        !std::all_of(nodes_.begin() + first, nodes_.begin() + last, is_idle)) {
        return false;
    }
    moved_[nodes_[last]] = node;
    return true;
}

// ggml names the owner of a view's memory, not what it is a view of: an owner that went, or is a view now, is another.
void graph_edit::move_views(const std::vector<ggml_tensor *> & order) const {
    for (ggml_tensor * node : order) {
        if (!is_view(node) || !node->src[0]) {
            continue;
        }
        size_t offset = 0;
        if (node->op == GGML_OP_VIEW) {
            std::memcpy(&offset, node->op_params, sizeof(offset));
        }
        ggml_tensor * of = node->src[0];
        node->view_src   = of->view_src ? of->view_src : of;
        node->view_offs  = of->view_offs + offset;
    }
}

// The nodes that stay, and those that were made, as they are computed.
std::vector<ggml_tensor *> graph_edit::new_order() const {
    std::vector<ggml_tensor *> order;
    order.reserve(nodes_.size() + in_front_.size());
    tensors moved;
    for (const auto & [_, node] : moved_) {
        moved.insert(node);
    }
    for (ggml_tensor * node : nodes_) {
        if (const auto made = in_front_.find(node); made != in_front_.end()) {
            order.push_back(made->second);
        }
        if (removed_.count(node) == 0 && moved.count(node) == 0) {
            order.push_back(node);
        }
        if (const auto here = moved_.find(node); here != moved_.end()) {
            order.push_back(here->second);
        }
    }
    return order;
}

// A backend fuses nodes by how often they are used.
void graph_edit::count_uses(const std::vector<ggml_tensor *> & order) const {
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

void graph_edit::finish() {
    const std::vector<ggml_tensor *> order = new_order();
    for (const auto & [_, made] : in_front_) {
        ggml_build_forward_expand(graph_, made); // makes it known to the graph
    }
    for (const change & each : changes_) {
        *each.node = each.to;
    }
    move_views(order);
    std::copy(order.begin(), order.end(), graph_->nodes);
    graph_->n_nodes = (int) order.size();
    count_uses(order);
}

} // namespace draftwood
