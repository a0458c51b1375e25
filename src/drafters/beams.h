// Rows of a tree that a drafter decodes into its own KV cache level by level, so that later levels go on from them:
// which see which, and which stay once a path is accepted. Must not know: models, probabilities.
// Test: tests/model/engine/test_tree_aborts.py (later drafts do not depend on how rounds went), test_trees.py.

#pragma once

#include "llama.h"
#include "llama/decode_request.h"
#include "tree/token_tree.h"

#include <vector>

namespace draftwood {

class beams : public row_mask {
  public:
    // n_stream_cells: of the KV cache that rows of one sequence are in
    beams(llama_seq_id seq, int64_t n_stream_cells) :
        seq_(seq),
        n_stream_cells_(n_stream_cells) {}

    void    clear() { *this = beams(seq_, n_stream_cells_); }
    bool    empty() const { return tokens_.empty(); }
    int32_t size() const { return (int32_t) tokens_.size(); }

    // the next row of the next decode, after row `parent` of an earlier one; -1: after the root. Returns its number.
    int32_t add(int32_t parent, llama_token token);

    void placed(const placed_rows & rows) noexcept override;

    // Frees all rows in the KV cache of `ctx` but those of the path tokens i32[n] after the root. Returns how many of
    // them were found.
    int32_t keep(llama_context * ctx, const llama_token * tokens, int32_t n);

  private:
    llama_seq_id             seq_;
    int64_t                  n_stream_cells_;
    std::vector<llama_token> tokens_;
    std::vector<int32_t>     parents_;
    std::vector<uint64_t>    ancestors_; // bit j: row j, the row itself included
    std::vector<uint32_t>    cells_;     // of those decoded so far, in the sequence's stream
};

} // namespace draftwood
