// See short_logits.h.

#include "llama/short_logits.h"

#include "llama-graph.h"

#include <algorithm>
#include <iterator>

namespace draftwood {

ggml_tensor * shorten_logits(llm_graph_context & graph, const head_rows & head) {
    ggml_tensor * logits = graph.res->get_logits();
    if (!head.few || !logits || logits->op != GGML_OP_MUL_MAT || logits->src[0] != head.whole) {
        return nullptr;
    }
    ggml_tensor * few = ggml_mul_mat(graph.ctx0, head.few, logits->src[1]);
    ggml_set_name(few, "dw_few_logits");
    ggml_set_output(few);
    ggml_build_forward_expand(graph.gf, few);
    // ggml takes no node out of a graph: the product becomes one that computes nothing
    logits->op = GGML_OP_NONE;
    std::fill(std::begin(logits->src), std::end(logits->src), nullptr);
    graph.res->t_logits = nullptr;
    return few;
}

} // namespace draftwood
