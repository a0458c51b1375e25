// Hidden states of the target that the MTP block reads: those of tokens that wait to be fed, and the newest one. A
// decode leaves them where the next one writes, so they are copied each round, whether a draft follows or not. A plain
// step's copies are one launch in the target's stream, if target and block share a device, and the block's stream waits
// for them only when it reads: in a pause a round pays for no more. Behind a verify the target's stream has a commit,
// so the block's own makes them beside it. Must not know: tokens, positions. Test: tests/model/engine/test_mtp_feed.py,
// test_joint_drafts.py, tests/gpu/test_same_text.py.

#pragma once

#include "llama/device_rows.h"
#include "llama/fence.h"
#include "llama/results.h"
#include "llama/row_copies.h"

#include <vector>

namespace draftwood {

class kept_states {
  public:
    // n_waiting states wait at most. They lie where `reader` computes. `from` must outlive this. Throws failure.
    kept_states(results & from, row_copies copies, ggml_backend_t reader, int64_t width, int64_t n_waiting);
    kept_states(const kept_states &)             = delete;
    kept_states & operator=(const kept_states &) = delete;

    // Of the newest decode, between begin() and end(): rows [row, row + n) of its hidden states wait as `to`..; row
    // `row` of them is the newest.
    void begin();
    void keep(int64_t to, int64_t row, int64_t n);
    void keep_newest(int64_t row);
    void end();
    // begin() and what followed was for nothing: no end() comes
    void drop();

    // the newest one waits as row `to`
    void push_newest(int64_t to);
    // rows [row, row + n) of those that wait go to `to`.., which is in front of them; they do not overlap
    void move(int64_t to, int64_t row, int64_t n);

    // What is queued on the reader's stream from now on reads all that was kept so far.
    void reach();

    const device_rows & waiting() const { return waiting_; } // f32[width, n_waiting]; reach() comes first
    std::vector<float>  newest() const;                      // f32[width]; waits for what is queued
    void                set_newest(const float * values);

  private:
    void launch();

    results &              from_;
    row_copies             copies_; // nullptr: target and reader do not share a device
    ggml_backend_t         reader_;
    device_rows            waiting_;
    device_rows            newest_; // f32[width, 2]: a launch has no order, so it reads one and writes the other
    int                    newest_at_ = 0;
    bool                   is_open_   = false; // between begin() and end(), and copies are pieces of a launch
    std::vector<row_piece> pieces_;            // of the next launch
    bool                   is_behind_ = false; // the reader's stream has not waited for the last launch
    bool                   is_used_   = false; // the reader's stream may have queued uses since the last launch
    fence                  written_, used_;
};

} // namespace draftwood
