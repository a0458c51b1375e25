// See memory_writes.h.

#include "llama/memory_writes.h"

#include "llama-graph.h"

#include <vector>

namespace draftwood {

void keep_memory_writes(llm_graph_context & graph) {
    std::vector<ggml_tensor *> writes, inputs;
    for (int i = 0; i < ggml_graph_n_nodes(graph.gf); ++i) {
        ggml_tensor * node = ggml_graph_node(graph.gf, i);
        if (node->op == GGML_OP_SET_ROWS) {
            writes.push_back(node);
        }
        for (ggml_tensor * source : node->src) {
            if (source && (source->flags & GGML_TENSOR_FLAG_INPUT)) {
                inputs.push_back(source);
            }
        }
    }
    if (writes.empty()) {
        return;
    }
    ggml_graph_clear(graph.gf);
    for (ggml_tensor * each : writes) {
        ggml_build_forward_expand(graph.gf, each);
    }
    for (ggml_tensor * each : inputs) {
        ggml_build_forward_expand(graph.gf, each);
    }
}

} // namespace draftwood
