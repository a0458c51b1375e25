// One speculative round as data: the proposed tree, the rows that a verify left, the walk over them. Each move names
// the states that it is legal in, and asserts them. Must not know: contexts, drafters, samplers.
// Test: tests/model/engine/test_rounds.py, test_failures.py.

#pragma once

#include "round/cost_model.h"
#include "tree/token_tree.h"

#include <cstdint>
#include <vector>

namespace draftwood {

enum class round_state {
    idle,     // no tree waits for anything
    proposed, // a tree waits for its verify
    walking,  // verified: the next row can be sampled, and all rows wait in the memory for a commit
    ended,    // verified: no row is left to sample, and all rows wait in the memory for a commit
};

// Where the tokens of a proposal are.
enum class tokens_at {
    host,   // in the tree
    device, // on the drafter's device; the tree holds the root's in their place
    verify, // the same, and the verify took them from there
};

// The newest token and what drafters made of it.
struct proposal {
    token_tree   tree;
    tokens_at    tokens         = tokens_at::host;
    draft_source source         = from_drafter;
    bool         by_drafter     = false; // it drafted, whatever it found
    bool         is_begun       = false; // behind the verify before
    int64_t      draft_start_us = 0;
};

class open_round {
  public:
    round_state state() const { return state_; }
    bool        is_proposed() const { return state_ == round_state::proposed; }
    bool        is_open() const { return state_ >= round_state::walking; }

    // The newest proposal. It stays after the round; drafters and fallbacks change it until it is verified.
    const proposal & draft() const { return draft_; }
    proposal &       draft() { return draft_; }

    // idle or proposed -> proposed. Rows of the last decode stay.
    void propose(int32_t root);
    // proposed -> idle
    void drop_proposal();
    // any -> the same without rows; walking and ended -> idle
    void drop_rows();
    // any -> idle without rows
    void forget();

    // proposed -> idle without rows, for the time of the verify. verify_again() takes it back.
    void verify_begins();
    void verify_again();
    // idle -> walking: n_rows rows of the batch from first_row on, the root at position pos. us: what they took, 0 if
    // not known.
    void verified(int32_t first_row, int32_t n_rows, int32_t pos, int64_t us);
    // idle -> idle with one row that can be sampled, of this token at position pos
    void evaluated(int32_t token, int32_t row, int32_t pos);

    // a row of the last decode can be sampled
    bool    has_row() const { return rows_ == rows::ready; }
    int32_t node() const;   // of the tree, whose row that is
    int32_t row() const;    // of the batch
    int32_t n_past() const; // that it stands for

    // The row counts as sampled before the sampler runs: whoever saves the state from within it ends the round with it.
    void take_row();
    void put_row_back(); // the sampler failed; no effect if the round ended meanwhile
    // The row taken gave this token: walking -> walking if a child equals it (true), else -> ended; idle -> idle.
    bool step(int32_t token);
    // The row sampled last can be sampled again; idle or proposed, can_rewind().
    bool    can_rewind() const { return !is_open() && n_sampled_ > 0; }
    int32_t last_row() const; // its row of the batch
    void    rewind();

    // walking or ended
    int32_t              n_rows() const { return n_rows_; } // of the verify
    int32_t              pos() const { return pos_; }       // of the root
    int32_t              first_row() const { return first_row_; }
    int64_t              verify_us() const { return verify_us_; }
    int32_t              n_sampled() const { return n_sampled_; }
    std::vector<int32_t> kept_path() const; // the root, and the nodes that were sampled
    // walking or ended -> idle
    void close();

  private:
    enum class rows { none, ready, sampled };

    void clear_rows();

    round_state state_ = round_state::idle;
    proposal    draft_;

    // the rows of the last decode, a verify or an evaluation
    rows                 rows_      = rows::none;
    int32_t              first_row_ = 0; // of node 0 in the batch
    int32_t              n_rows_    = 0;
    std::vector<int32_t> path_; // nodes, the one to be sampled next included while there is one
    int32_t              n_sampled_ = 0;
    int32_t              pos_       = 0; // of node 0; the i-th of the path stands for n_past = pos + i + 1
    int64_t              verify_us_ = 0;
};

} // namespace draftwood
