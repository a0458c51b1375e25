// MTP (NextN) drafting: the model's own next-token block in a second context on the same weights.

#pragma once

#include "drafter.h"
#include "drafter_context.h"

namespace draftwood {

// The block sees pairs (token at p, target's hidden state at p - 1) and predicts the token at p + 1; further
// drafts feed the block its own output row as hidden state (src/models/qwen35moe.cpp, graph_mtp at the pin).
// Position 0 has no pair and stays empty, as in training. Pairs of accepted drafts stay as they were drafted, with the
// block's own hidden state; those of rejected ones go.
// Test: tests/model/engine, tests/model/test_parity.py.
class mtp_drafter : public drafter {
  public:
    // makes its own context from the target's parameters; throws failure
    mtp_drafter(llama_context * target, llama_context_params params, int32_t exact_rows);
    ~mtp_drafter() override;

    void observe(const llama_token * tokens, int32_t n_tokens, llama_pos pos) override;
    bool draft(llama_token last, llama_pos pos, int32_t max_draft, float p_min,
               std::vector<llama_token> & out) override;
    void trim(llama_pos n_keep) override;
    void reset() override;

    std::vector<float> mark(llama_pos pos) const override; // the hidden state at pos - 1
    void               resume(llama_pos pos, const std::vector<float> & mark) override;

  private:
    // kept tokens whose pairs are not in the block's KV cache yet; row i of hidden belongs to tokens[i]
    struct pair_queue {
        llama_pos                pos = 0; // of the first pair
        std::vector<llama_token> tokens;
        std::vector<float>       hidden; // f32[tokens.size()][n_embd]
    };

    void feed(int32_t n, bool output);
    void catch_up();
    void push(llama_token token, llama_pos pos, const float * hidden);
    void drop_cells_from(llama_pos pos);

    llama_context * target_;
    drafter_context ctx_;
    int32_t         n_embd_;
    int32_t         n_rows_max_; // pairs per decode

    pair_queue         queue_;
    llama_pos          n_fed_      = 0;  // pairs of positions under this are in the KV cache (or were skipped)
    llama_pos          hidden_pos_ = -1; // position that hidden_ belongs to; -1: unknown
    std::vector<float> hidden_;          // f32[n_embd] the target's hidden state at hidden_pos_
};

} // namespace draftwood
