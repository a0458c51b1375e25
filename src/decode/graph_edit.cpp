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
    nodes_(graph->nodes, graph->nodes + graph->n_nodes) {
    number();
    find_readers();
    for (const ggml_tensor * node : kept) {
        if (node) {
            of(node).is_kept = true;
        }
    }
}

void graph_edit::number() {
    const auto unknown = (int32_t) (nodes_.size() + (size_t) graph_->n_leafs);
    known_.resize((size_t) unknown + 1);
    numbers_.resize(graph_->visited_hash_set.size, unknown);
    int32_t n = 0;
    for (const ggml_tensor * node : nodes_) {
        numbers_[ggml_hash_find(&graph_->visited_hash_set, node)] = n++;
    }
    for (int i = 0; i < graph_->n_leafs; ++i) {
        numbers_[ggml_hash_find(&graph_->visited_hash_set, graph_->leafs[i])] = n++;
    }
}

int32_t graph_edit::number_of(const ggml_tensor * tensor) const {
    const size_t place = ggml_hash_find(&graph_->visited_hash_set, tensor);
    return place == GGML_HASHSET_FULL ? (int32_t) known_.size() - 1 : numbers_[place];
}

// A node that reads a tensor twice is one reader.
void graph_edit::find_readers() {
    struct reading {
        int32_t       source;
        ggml_tensor * by;
    };
    std::vector<reading>       all;
    std::vector<ggml_tensor *> newest(known_.size(), nullptr); // reader
    for (ggml_tensor * node : nodes_) {
        for_each_source(node, [&](const ggml_tensor * source) {
            const int32_t number = number_of(source);
            if (newest[number] != node) {
                newest[number] = node;
                known_[number].n_readers++;
                all.push_back({ number, node });
            }
        });
    }
    int32_t n = 0;
    for (known & each : known_) {
        each.first_reader = n;
        n += each.n_readers;
        each.n_readers = 0;
    }
    readers_.resize((size_t) n);
    for (const reading & each : all) {
        known & source                                     = known_[each.source];
        readers_[source.first_reader + source.n_readers++] = each.by;
    }
}

graph_edit::readers graph_edit::users(const ggml_tensor * tensor) const {
    if (!tensor) {
        return { nullptr, 0 };
    }
    const known & found = of(tensor);
    return { readers_.data() + found.first_reader, (size_t) found.n_readers };
}

ggml_tensor * graph_edit::only_user(const ggml_tensor * tensor) const {
    const readers found = users(tensor);
    return found.size() == 1 ? found[0] : nullptr;
}

std::vector<const ggml_tensor *> graph_edit::between(const std::vector<ggml_tensor *> &       results,
                                                     const std::vector<const ggml_tensor *> & inputs) {
    ++walk_;
    std::vector<const ggml_tensor *> found(results.begin(), results.end());
    for (const ggml_tensor * result : results) {
        of(result).walk = walk_;
    }
    for (size_t i = 0; i < found.size(); ++i) {
        for_each_source(found[i], [&](const ggml_tensor * source) {
            const bool is_input = std::find(inputs.begin(), inputs.end(), source) != inputs.end();
            if (is_input || source->op == GGML_OP_NONE) {
                return;
            }
            if (known & here = of(source); here.walk != walk_) {
                here.walk = walk_;
                found.push_back(source);
            }
        });
    }
    return found;
}

bool graph_edit::is_held(const ggml_tensor * node) const {
    return (node->flags & GGML_TENSOR_FLAG_OUTPUT) != 0 || of(node).is_kept;
}

bool graph_edit::may_go(const ggml_tensor * node) const {
    const readers all = users(node);
    return !is_held(node) &&
           std::all_of(all.begin(), all.end(), [&](const ggml_tensor * user) { return of(user).walk == walk_; });
}

bool graph_edit::is_closed(const std::vector<ggml_tensor *> &       results,
                           const std::vector<const ggml_tensor *> & inputs) {
    const std::vector<const ggml_tensor *> all = between(results, inputs);
    return std::all_of(all.begin(), all.end(), [&](const ggml_tensor * node) {
        const known & here      = of(node);
        const bool    is_result = std::find(results.begin(), results.end(), node) != results.end();
        return !here.is_removed && here.change < 0 && (is_result || may_go(node));
    });
}

void graph_edit::remove(const std::vector<ggml_tensor *> & results, const std::vector<const ggml_tensor *> & inputs) {
    for (const ggml_tensor * node : between(results, inputs)) {
        of(node).is_removed = true;
    }
}

// the node stays
void graph_edit::change_to(ggml_tensor * node, const ggml_tensor & to) {
    known & here    = of(node);
    here.is_removed = false;
    here.change     = (int32_t) changes_.size();
    changes_.push_back({ node, to });
}

void graph_edit::replace(ggml_tensor * result, const std::vector<ggml_tensor *> & ended,
                         const std::vector<const ggml_tensor *> & inputs, const ggml_tensor * made) {
    std::vector<ggml_tensor *> results(ended);
    results.push_back(result);
    remove(results, inputs);
    ggml_tensor to = *result;
    to.op          = made->op;
    to.view_src    = nullptr;
    to.view_offs   = 0;
    std::copy(std::begin(made->src), std::end(made->src), to.src);
    std::copy(std::begin(made->op_params), std::end(made->op_params), to.op_params);
    std::copy(std::begin(made->nb), std::end(made->nb), to.nb);
    change_to(result, to);
}

void graph_edit::split(const std::vector<ggml_tensor *> & results, const std::vector<ggml_tensor *> & ended,
                       const std::vector<const ggml_tensor *> & inputs, ggml_tensor * made) {
    std::vector<ggml_tensor *> all(results);
    all.insert(all.end(), ended.begin(), ended.end());
    remove(all, inputs);
    size_t  at    = 0;
    int32_t first = (int32_t) nodes_.size();
    for (ggml_tensor * result : results) {
        ggml_tensor to = *result;
        make_view(to, made, at);
        change_to(result, to);
        at += (size_t) ggml_nelements(result) * sizeof(float);
        first = std::min(first, number_of(result));
    }
    known_[first].in_front = made;
}

const ggml_tensor * graph_edit::array_of(const ggml_tensor * result) const {
    const int32_t at = result ? of(result).change : -1;
    return at < 0 ? nullptr : changes_[at].to.view_src;
}

bool graph_edit::postpone(ggml_tensor * node, const std::vector<ggml_tensor *> & others,
                          const std::vector<const ggml_tensor *> & inputs) {
    int32_t first = (int32_t) nodes_.size(), last = 0;
    for (const ggml_tensor * other : others) {
        first = std::min(first, number_of(other));
        last  = std::max(last, number_of(other));
    }
    const auto is_late  = [&](const ggml_tensor * reader) { return number_of(reader) > last; };
    const auto is_early = [&](const ggml_tensor * input) {
        const int32_t number = number_of(input);
        return !is_node(number) || number < last;
    };
    const auto is_idle = [&](const ggml_tensor * between) {
        return is_view(between) || std::find(others.begin(), others.end(), between) != others.end();
    };
    const readers all = users(node);
    if (!is_node(last) || !std::all_of(all.begin(), all.end(), is_late) ||
        !std::all_of(inputs.begin(), inputs.end(), is_early) ||
        !std::all_of(nodes_.begin() + first, nodes_.begin() + last, is_idle)) {
        return false;
    }
    known_[last].behind = node;
    of(node).is_moved   = true;
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
    order.reserve(nodes_.size());
    for (size_t i = 0; i < nodes_.size(); ++i) {
        const known & here = known_[i];
        if (here.in_front) {
            order.push_back(here.in_front);
        }
        if (!here.is_removed && !here.is_moved) {
            order.push_back(nodes_[i]);
        }
        if (here.behind) {
            order.push_back(here.behind);
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
    for (size_t i = 0; i < nodes_.size(); ++i) {
        if (known_[i].in_front) {
            ggml_build_forward_expand(graph_, known_[i].in_front); // makes it known to the graph
        }
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
