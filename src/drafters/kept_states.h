// Hidden states of the target that the MTP block reads: those of tokens that wait to be fed, and the newest one. A
// decode leaves them where the next one writes, so they are copied each round, whether a draft follows or not. Where
// target and block share a GPU, a round's copies are one launch in the target's stream, and the block's waits for them
// only when it reads: a round without a draft pays for nothing else. Elsewhere the block's stream makes them. Must not
// know: tokens, positions. Test: tests/model/engine, tests/gpu/test_same_text.py.

#pragma once

#include "llama/device_rows.h"
#include "llama/fence.h"
#include "llama/results.h"

#include <vector>

namespace draftwood {

class kept_states {
  public:
    // f32[width, n_waiting] and f32[width] where `reader` computes. `from` must outlive it. Throws failure.
    kept_states(results & from, row_copies copies, ggml_backend_t reader, int64_t width, int64_t n_waiting);
    kept_states(const kept_states &)             = delete;
    kept_states & operator=(const kept_states &) = delete;

    // Of the newest decode, between begin() and end(): rows [row, row + n) of its hidden states wait as `to`..; row
    // `row` of them is the newest.
    void begin();
    void keep(int64_t to, int64_t row, int64_t n);
    void keep_newest(int64_t row);
    void end();

    // the newest one waits as row `to`
    void push_newest(int64_t to);
    // rows [row, row + n) of those that wait, which are `to` or more, go to `to`..
    void move(int64_t to, int64_t row, int64_t n);

    // What is queued on the reader's stream from now on reads all that was kept so far.
    void reach();

    const device_rows & waiting() const { return waiting_; }
    std::vector<float>  newest() const; // waits for what is queued
    void                set_newest(const float * values);

  private:
    void launch();

    results &              from_;
    row_copies             copies_; // nullptr: the target's device has none
    ggml_backend_t         reader_;
    device_rows            waiting_;
    device_rows            newest_; // two, the newest is one of them: a launch may read it and write the next
    int                    newest_at_ = 0;
    bool                   is_open_   = false; // between begin() and end(), and a launch makes its copies
    std::vector<row_piece> pieces_;            // of the next launch
    bool                   is_behind_ = false; // the reader's stream has not waited for the last launch
    bool                   is_read_   = false; // it may read since the last launch
    fence                  written_, taken_;
};

} // namespace draftwood
