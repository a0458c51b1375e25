// See short_logits.h.

#include "llama/short_logits.h"

#include "llama-graph.h"

namespace draftwood {

namespace {

bool is_read(ggml_cgraph * graph, const ggml_tensor * tensor) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        for (const ggml_tensor * source : ggml_graph_node(graph, i)->src) {
            if (source == tensor) {
                return true;
            }
        }
    }
    return false;
}

} // namespace

ggml_tensor * shorten_logits(llm_graph_context & graph, const head_rows & head) {
    ggml_tensor * logits = graph.res->get_logits();
    if (!head.few || !logits || logits->op != GGML_OP_MUL_MAT || logits->src[0] != head.whole ||
        is_read(graph.gf, logits)) {
        return nullptr;
    }
    // in place: ggml takes no node out of a graph
    ggml_build_forward_expand(graph.gf, head.few);
    logits->src[0] = head.few;
    logits->ne[0]  = head.few->ne[1];
    for (int i = 1; i < GGML_MAX_DIMS; ++i) {
        logits->nb[i] = logits->nb[i - 1] * logits->ne[i - 1];
    }
    ggml_set_name(logits, "dw_few_logits");
    ggml_set_output(logits);
    graph.res->t_logits = nullptr;
    return logits;
}

} // namespace draftwood
