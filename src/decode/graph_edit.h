// Changes to a graph that is built and has no memory yet: what several nodes compute is put into one. A node whose
// result somebody holds stays where it is and becomes another op; nodes that served it alone go. Must not know: which
// ops. Test: tests/model/test_fused_layers.py.

#pragma once

#include "ggml.h"

#include <unordered_map>
#include <unordered_set>
#include <vector>

struct ggml_cgraph;

namespace draftwood {

class graph_edit {
  public:
    // kept: nodes that somebody holds, or nullptr; they may change, but not go
    graph_edit(ggml_cgraph * graph, const std::vector<const ggml_tensor *> & kept);
    graph_edit(const graph_edit &)             = delete;
    graph_edit & operator=(const graph_edit &) = delete;

    // a copy: nodes that replacements remove or change stay valid, and keep their sources until finish()
    const std::vector<ggml_tensor *> & nodes() const { return nodes_; }

    // Nodes that read `tensor`, in the graph's order.
    const std::vector<ggml_tensor *> & users(const ggml_tensor * tensor) const;

    // the node that alone reads `tensor`; nullptr: there are none or several, or no tensor
    ggml_tensor * only_user(const ggml_tensor * tensor) const;

    // Whether all between `inputs` and `results` serves these results alone, and nothing of it was changed before: they
    // can be computed another way.
    bool is_closed(const std::vector<ggml_tensor *> & results, const std::vector<const ggml_tensor *> & inputs) const;

    // `result` becomes `made`, a node that no graph has, of the same shape. What is between `ended` and the inputs
    // goes, too: nodes whose work `made` does beside its result. Call after is_closed() for the result and these.
    void replace(ggml_tensor * result, const std::vector<ggml_tensor *> & ended,
                 const std::vector<const ggml_tensor *> & inputs, const ggml_tensor * made);

    // `node` is computed where the last of `others` was, from `inputs`. false, and nothing is changed, if one of its
    // readers is in front of that place, an input behind it, or if something is computed between the others.
    bool postpone(ggml_tensor * node, const std::vector<ggml_tensor *> & others,
                  const std::vector<const ggml_tensor *> & inputs);

    // whether somebody holds the node: it may not become a view
    bool is_held(const ggml_tensor * node) const;

    // The results become what they are of `made`, an array of F32: one after another, each contiguous. `made` takes the
    // place of the first of them. `ended` as above. Nobody may hold a result. Call after is_closed().
    void split(const std::vector<ggml_tensor *> & results, const std::vector<ggml_tensor *> & ended,
               const std::vector<const ggml_tensor *> & inputs, ggml_tensor * made);

    // The node of split() that `result` is a view of now, or nullptr. It runs in front of the first of that split's
    // results.
    const ggml_tensor * array_of(const ggml_tensor * result) const;

    // Writes the changes to the graph. Throws std::bad_alloc before the first of them.
    void finish();

  private:
    using tensors = std::unordered_set<const ggml_tensor *>;

    std::vector<ggml_tensor *> new_order() const;

    bool    may_go(const ggml_tensor * node, const tensors & together) const;
    void    move_views(const std::vector<ggml_tensor *> & order) const;
    void    count_uses(const std::vector<ggml_tensor *> & order) const;
    tensors between(const std::vector<ggml_tensor *> & results, const std::vector<const ggml_tensor *> & inputs) const;

    struct change {
        ggml_tensor * node;
        ggml_tensor   to;
    };

    ggml_cgraph *                                                       graph_;
    std::vector<ggml_tensor *>                                          nodes_;
    std::unordered_map<const ggml_tensor *, std::vector<ggml_tensor *>> users_;
    std::unordered_map<const ggml_tensor *, ggml_tensor *>              in_front_; // of a node, what was made
    std::unordered_map<const ggml_tensor *, ggml_tensor *>              moved_;    // to a node's place
    std::vector<change>                                                 changes_;
    tensors                                                             kept_, changed_, removed_;
};

} // namespace draftwood
