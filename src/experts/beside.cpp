// See beside.h.

#include "experts/beside.h"

#include "ggml-impl.h"

#include <algorithm>
#include <unordered_set>
#include <vector>

namespace draftwood {

namespace {

bool only_names_memory(const ggml_tensor * node) {
    return node->op == GGML_OP_NONE || node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE ||
           node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE;
}

const ggml_tensor * memory_of(const ggml_tensor * tensor) {
    return tensor->view_src ? tensor->view_src : tensor;
}

// Tensors that hold what the copies bring, or what was computed from it. By memory: a view is what it views.
class tainted {
  public:
    explicit tainted(const ggml_tensor * first) { add(first); }

    // A node that writes into memory which it does not own stays where it is, and so does who reads that later.
    bool takes(const ggml_tensor * node) {
        const bool writes = node->view_src && !only_names_memory(node);
        if (!writes && !reads(node)) {
            return false;
        }
        add(node);
        return true;
    }

  private:
    bool reads(const ggml_tensor * node) const {
        const auto is_tainted = [&](const ggml_tensor * each) { return each && memory_.count(memory_of(each)) > 0; };
        return is_tainted(node->view_src) || std::any_of(std::begin(node->src), std::end(node->src), is_tainted);
    }
    void add(const ggml_tensor * node) { memory_.insert(memory_of(node)); }

    std::unordered_set<const ggml_tensor *> memory_;
};

// the CPU's own buffer types name no device
bool is_on(const ggml_tensor * tensor, ggml_backend_dev_t device) {
    ggml_backend_dev_t found = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(tensor->buffer));
    return found ? found == device : ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
}

bool has_weights_elsewhere(const ggml_tensor * node, ggml_backend_dev_t device) {
    return std::any_of(std::begin(node->src), std::end(node->src),
                       [&](const ggml_tensor * each) { return each && each->buffer && !is_on(each, device); });
}

} // namespace

int32_t move_in_front(ggml_cgraph * graph, const ggml_tensor * wait, ggml_backend_dev_t device) {
    ggml_tensor ** const end   = graph->nodes + graph->n_nodes;
    ggml_tensor ** const first = std::find(graph->nodes, end, wait);
    if (first == end) {
        return 0;
    }
    tainted                    behind(wait);
    std::vector<ggml_tensor *> moved, left{ *first };
    int32_t                    n_computed = 0;
    for (ggml_tensor ** node = first + 1; node != end; ++node) {
        if (behind.takes(*node)) {
            left.push_back(*node);
            continue;
        }
        if (has_weights_elsewhere(*node, device)) {
            return 0;
        }
        moved.push_back(*node);
        n_computed += only_names_memory(*node) ? 0 : 1;
    }
    if (n_computed > 0) {
        std::copy(left.begin(), left.end(), std::copy(moved.begin(), moved.end(), first));
    }
    return n_computed;
}

bool stays_on(const ggml_cgraph * graph, const ggml_tensor * first, ggml_backend_dev_t device) {
    ggml_tensor ** const end = graph->nodes + graph->n_nodes;
    return std::none_of(std::find(graph->nodes, end, first), end, [&](const ggml_tensor * node) {
        return has_weights_elsewhere(node, device) ||
               (!only_names_memory(node) && !ggml_backend_dev_supports_op(device, node));
    });
}

} // namespace draftwood
