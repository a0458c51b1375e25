// Which of a context's two thread counts a verify runs on: n_threads_batch, as prompts do, until times say that
// n_threads, as plain steps do, is faster: hyper-threads slow each other down, or another program has some of the
// cores. Each number of rows is timed on both. The slower one is tried again after 64 verifies, then after 128, up to
// 1024. Plain arithmetic. Must not know: contexts, rounds. Test: tests/unit/test_thread_choice.py, through
// draftwood-testing.h.

#pragma once

#include "draftwood.h"

#include <array>
#include <cstdint>

namespace draftwood {

enum verify_threads : int32_t { of_prompts = 0, of_steps = 1, n_verify_threads = 2 };

class thread_choice {
  public:
    // Choose for the next verify, of n_rows rows. More than DW_MAX_TREE count as so many.
    verify_threads choose(int32_t n_rows);

    // The microseconds of that verify, if it succeeded. Returns false if it was a trial: later ones do not run like it.
    bool add_time(int64_t us);

  private:
    static constexpr int32_t n_recent = 5;

    // times of one size on one thread count
    struct times {
        std::array<double, n_recent> recent{};
        int32_t                      n     = 0;
        double                       least = 0.0;

        void   add(double us);
        double median() const; // of the newest five; 0: none
    };

    struct size {
        std::array<times, n_verify_threads> on{};
        verify_threads                      chosen     = of_prompts;
        bool                                is_warm    = false; // its graph was built by an untimed verify
        int32_t                             n_verifies = 0;     // since the last trial
        int32_t                             interval   = 0;     // verifies until the next trial; 0: not tried yet

        verify_threads other() const { return chosen == of_prompts ? of_steps : of_prompts; }
    };

    bool wants_trial(int32_t n_rows) const;
    bool is_settled_below(int32_t n_rows) const;

    std::array<size, DW_MAX_TREE + 1> sizes_{};
    int32_t                           n_rows_  = 0; // of the next verify
    verify_threads                    runs_on_ = of_prompts;
};

} // namespace draftwood
