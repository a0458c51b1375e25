// Chooses n_threads or n_threads_batch for each verify. It starts with n_threads_batch, as llama.cpp has it for
// batches. It changes to n_threads if that was measured to be faster: hyper-threads can slow each other down, and
// another program can have some of the cores. Each number of rows has times of its own. Plain arithmetic. Must not
// know: contexts, rounds. Test: tests/unit/test_thread_choice.py, through draftwood-testing.h.

#pragma once

#include "draftwood.h"

#include <array>
#include <cstdint>

namespace draftwood {

enum thread_count : int32_t { n_threads_batch = 0, n_threads = 1 };

class thread_choice {
  public:
    static constexpr int32_t max_rows = DW_MAX_TREE;

    // Choose for the next verify, of n_rows rows, 1 to max_rows.
    thread_count choose(int32_t n_rows);

    // The microseconds of that verify, if it succeeded. Returns false if it was a trial of the count that is not
    // chosen.
    bool add_time(int64_t us);

  private:
    static constexpr int32_t n_recent = 5;

    struct size {
        std::array<double, n_recent> recent{}; // newest times on the chosen count
        int64_t                      n_times    = 0;
        thread_count                 chosen     = n_threads_batch;
        bool                         is_warm    = false; // its graph was built by an untimed verify
        bool                         is_clear   = false; // the newest trial was much slower
        double                       trial_us   = 0.0;   // of the newest trial; 0: none yet
        int32_t                      n_wins     = 0;     // trials in a row that were faster
        int32_t                      n_verifies = 0;     // since the newest trial
        int32_t                      interval   = 0;     // verifies until the next one

        thread_count other() const { return chosen == n_threads ? n_threads_batch : n_threads; }
        double       median() const; // of the newest times; 0: none
    };

    bool wants_trial(int32_t n_rows) const;
    void judge_trial(size & it, double us);

    std::array<size, max_rows + 1> sizes_{};
    int32_t                        n_rows_   = 0; // of the next verify
    bool                           is_trial_ = false;
};

} // namespace draftwood
