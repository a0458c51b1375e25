// The pool's part of a graph: a product with experts' weights that lie in a pool reads slots. Before the first such
// product of a layer stands the op that makes room for the chosen experts (ops/expert-slots/expert-slots.h).
// Must not know: contexts, rounds. Test: tests/model/test_expert_pool.py.

#pragma once

struct ggml_cgraph;
struct ggml_context;
struct ggml_tensor;

namespace draftwood {

// The product of `weights` [n, m, E] with x [n, k or 1, R], of the experts ids i32[k, R]; ggml_mul_mat_id's node.
// nullptr: the weights lie in no pool. watched: the graph runs in pieces that somebody looks at (cb_eval), so nothing
// may run beside. Throws std::bad_alloc; a plain product is right then, too.
ggml_tensor * pooled_product(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * weights, ggml_tensor * x,
                             ggml_tensor * ids, bool watched);

} // namespace draftwood
