// Changes to a graph that is built and has no memory yet: what several nodes compute is put into one. A node whose
// result somebody holds stays where it is and becomes another op; nodes that served it alone go. Must not know: which
// ops. Test: tests/model/test_fused_layers.py.

#pragma once

#include "ggml.h"

#include <cstdint>
#include <vector>

struct ggml_cgraph;

namespace draftwood {

class graph_edit {
  public:
    // nodes that read a tensor, in the graph's order; valid as long as the edit
    class readers {
      public:
        readers(ggml_tensor * const * begin, size_t n) :
            begin_(begin),
            size_(n) {}
        ggml_tensor * const * begin() const { return begin_; }
        ggml_tensor * const * end() const { return begin_ + size_; }
        ggml_tensor *         operator[](size_t i) const { return begin_[i]; }
        size_t                size() const { return size_; }
        bool                  empty() const { return size_ == 0; }

      private:
        ggml_tensor * const * begin_;
        size_t                size_;
    };

    // kept: nodes that somebody holds, or nullptr; they may change, but not go
    graph_edit(ggml_cgraph * graph, const std::vector<const ggml_tensor *> & kept);
    graph_edit(const graph_edit &)             = delete;
    graph_edit & operator=(const graph_edit &) = delete;

    // a copy: nodes that replacements remove or change stay valid, and keep their sources until finish()
    const std::vector<ggml_tensor *> & nodes() const { return nodes_; }

    readers users(const ggml_tensor * tensor) const;

    // the node that alone reads `tensor`; nullptr: there are none or several, or no tensor
    ggml_tensor * only_user(const ggml_tensor * tensor) const;

    // Whether all between `inputs` and `results` serves these results alone, and nothing of it was changed before: they
    // can be computed another way.
    bool is_closed(const std::vector<ggml_tensor *> & results, const std::vector<const ggml_tensor *> & inputs);

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
    struct change {
        ggml_tensor * node;
        ggml_tensor   to;
    };

    // Of a tensor: nodes come first, as in nodes_, then leafs, and one that stands for all others.
    struct known {
        int32_t       first_reader = 0, n_readers = 0;
        int32_t       change   = -1;      // of changes_; -1: none
        uint32_t      walk     = 0;       // of between(), the newest that came by
        ggml_tensor * in_front = nullptr; // made for this place
        ggml_tensor * behind   = nullptr; // moved to this place
        bool          is_kept = false, is_removed = false, is_moved = false;
    };

    int32_t       number_of(const ggml_tensor * tensor) const;
    known &       of(const ggml_tensor * tensor) { return known_[number_of(tensor)]; }
    const known & of(const ggml_tensor * tensor) const { return known_[number_of(tensor)]; }

    bool is_node(int32_t number) const { return (size_t) number < nodes_.size(); }

    void number();
    void find_readers();
    void change_to(ggml_tensor * node, const ggml_tensor & to);

    // What is between inputs and results, these included, and leafs not. All of it has `walk_` until the next call.
    std::vector<const ggml_tensor *> between(const std::vector<ggml_tensor *> &       results,
                                             const std::vector<const ggml_tensor *> & inputs);
    bool                             may_go(const ggml_tensor * node) const; // with what between() found
    void remove(const std::vector<ggml_tensor *> & results, const std::vector<const ggml_tensor *> & inputs);

    std::vector<ggml_tensor *> new_order() const;
    void                       move_views(const std::vector<ggml_tensor *> & order) const;
    void                       count_uses(const std::vector<ggml_tensor *> & order) const;

    ggml_cgraph *              graph_;
    std::vector<ggml_tensor *> nodes_;
    std::vector<int32_t>       numbers_; // by a tensor's place in the graph's hash set
    std::vector<known>         known_;   // by number
    std::vector<ggml_tensor *> readers_; // of one tensor behind another
    std::vector<change>        changes_;
    uint32_t                   walk_ = 0;
};

} // namespace draftwood
