// What begins and ends an attention layer in llama.cpp's graphs: see fuser.h.

#include "decode/fuser.h"
#include "decode/pattern.h"

namespace draftwood {

bool fuser::attention_inputs(ggml_tensor * scaled) {
    const norm                       normal  = norm::of(scaled);
    const std::vector<ggml_tensor *> results = edit_.users(scaled);
    if (!normal || results.size() != 3 || !has_few_rows(normal.x)) {
        return false;
    }
    int64_t n_values = 0;
    for (ggml_tensor * product : results) {
        if (!weights_times(product, scaled) || !ggml_is_contiguous(product)) {
            return false;
        }
        n_values += ggml_nelements(product);
    }
    if (!edit_.is_closed(results, { normal.x })) {
        return false;
    }
    ggml_tensor *q = results[0]->src[0], *k = results[1]->src[0], *v = results[2]->src[0];
    namespace op = parts::attention_inputs;
    ggml_tensor * node =
        made(op::signature, { n_values, 1, 1, 1 },
             { { op::x, normal.x }, { op::norm, normal.weights }, { op::q, q }, { op::k, k }, { op::v, v } },
             { normal.weights, q, k, v }, { normal.epsilon, 0, 0 });
    return split(results, { normal.x }, node);
}

bool fuser::attention_output(ggml_tensor * sum) {
    ggml_tensor * residual = source(as(sum, GGML_OP_ADD), 1);
    ggml_tensor * product  = as(source(as(sum, GGML_OP_ADD)), GGML_OP_MUL_MAT);
    ggml_tensor * gated    = as(source(product, 1), GGML_OP_MUL);
    ggml_tensor * copied   = as(source(as(source(gated, 1), GGML_UNARY_OP_SIGMOID)), GGML_OP_CONT);
    ggml_tensor * gate     = as(source(copied), GGML_OP_VIEW);
    if (!gate || product->src[0]->op != GGML_OP_NONE || !has_few_rows(residual)) {
        return false;
    }
    ggml_tensor *y = gated->src[0], *weights = product->src[0];
    if (!edit_.is_closed({ sum }, { y, gate, residual })) {
        return false;
    }
    namespace op = parts::attention_output;
    return replace(sum, { y, gate, residual },
                   made(op::signature, { sum->ne[0], sum->ne[1], 1, 1 },
                        { { op::y, y }, { op::gate, gate }, { op::weights, weights }, { op::residual, residual } },
                        { weights }, {}));
}

} // namespace draftwood
