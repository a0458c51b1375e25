// Places that a sequence with recurrent layers can go back to. Their state stands for one position only, so a copy of
// it is kept where a later request may part from this one; attention layers just drop cells. Least recently used copies
// go when the budget is full. Must not know: contexts, drafters, who decides where.
// Test: tests/model/test_checkpoints.py.

#pragma once

#include "llama.h"

#include <cstdint>
#include <list>
#include <vector>

namespace draftwood {

struct checkpoint {
    llama_pos            pos = 0; // tokens before it; they are those of the sequence as long as it is kept
    std::vector<uint8_t> state;   // of the recurrent layers behind them
    std::vector<float>   drafter; // what drafter::mark returned then

    size_t bytes() const { return state.size() + drafter.size() * sizeof(float); }
};

class checkpoints {
  public:
    // budget: most bytes held; 0: none are
    explicit checkpoints(size_t budget) :
        budget_(budget) {}

    // drop old ones until n_bytes more are within the budget; false: they never are
    bool make_room(size_t n_bytes);
    // keep `entry`, for which there is room
    void put(checkpoint entry);
    // the one at `pos`, now the most recently used; nullptr: none
    const checkpoint * find(llama_pos pos);
    // the largest position up to n_keep that has one; 0: none has
    llama_pos reach(llama_pos n_keep) const;

    // the sequence was cut to n_keep tokens: what lies behind may differ from now on
    void drop_beyond(llama_pos n_keep);
    void clear() { entries_.clear(); }

    int64_t count() const { return (int64_t) entries_.size(); }
    size_t  bytes() const;

  private:
    size_t                budget_;
    std::list<checkpoint> entries_; // most recently used first
};

} // namespace draftwood
