// How many tokens each sequence of a batch should draft: those with the most expected tokens of all sequences per
// microsecond. With many sequences that may be none. Times of rounds together, which engines of a context share.
// Plain arithmetic on counts and times. Must not know: engines, llama types.
// Tests: tests/unit/test_batch_model.py, through draftwood-testing.h; tests/model/engine/test_batches.py.

#pragma once

#include "round/acceptance.h"
#include "round/cost_model.h"
#include "round/trials.h"

#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

namespace draftwood {

class batch_model {
  public:
    // as in cost_model
    batch_model(int32_t n_warmup, bool shares_cores);

    // A graph verified n_rows rows of each of so many sequences, or drafters of so many made drafts of up to n_tokens
    // together, in `us` microseconds; or a sequence's draft was committed.
    void add_verify(int32_t n_sequences, int32_t n_rows, double us);
    void add_draft(int32_t n_sequences, int32_t n_tokens, double us);
    void add_commit(double us);

    // Expected microseconds, commits included; 0: nothing is known. What was not measured is estimated by what is
    // nearest, and by `solo`, the times of a sequence alone.
    double verify(int32_t n_sequences, int32_t n_rows, const cost_model & solo) const;
    double draft(int32_t n_sequences, int32_t n_tokens, const cost_model & solo) const;

    // what a graph takes beside its rows, in rows: until something is measured
    double graph_rows() const;

    // One sequence of a batch.
    struct member {
        std::vector<double> tokens;     // expected of its round, by tokens drafted: 0, 1, ..
        bool                by_drafter; // drafts take time; else they are n-grams'
        int32_t             fixed_rows; // of its verify, whatever others do; 0: they are to be chosen
    };
    // expected microseconds of a verify of so many rows of each member, 0: not known
    using verify_time = std::function<double(const std::vector<int32_t> &)>;

    // Choose the tokens that members draft, 0 for those with fixed rows. Once a round. All take a plain step now and
    // then, and all draft two tokens if that was long ago, to know the times of batches.
    std::vector<int32_t> choose(const std::vector<member> & members, const verify_time & time, const cost_model & solo);

  private:
    struct mean_time {
        double  mean  = 0.0; // microseconds at speed 1; 0: not known
        int32_t count = 0;
    };
    using times = std::map<std::pair<int32_t, int32_t>, mean_time>; // by sequences, and rows or tokens of each
    using shape = std::function<double(int32_t, int32_t)>; // times in any unit, of sequences and rows or tokens

    struct choice {
        std::vector<int32_t> n_tokens;
        double               tokens, micros;
    };

    void          add(times & all, int32_t n_sequences, int32_t n, double us);
    static double at(const times & all, int32_t n_sequences, int32_t n, const shape & alone, bool in_micros);
    bool          must_be_plain(int32_t n_sequences);
    choice        evaluate(const std::vector<member> & members, std::vector<int32_t> n_tokens, const verify_time & time,
                           const cost_model & solo) const;
    choice        fastest(const std::vector<member> & members, const verify_time & time, const cost_model & solo) const;

    int32_t n_warmup_;
    bool    shares_cores_;

    times          verifies_, drafts_;
    double         speed_     = 1.0; // what times are now, over their means
    double         commit_us_ = 0.0;
    trial_schedule trials_;

    std::map<int32_t, int32_t> n_since_plain_; // rounds with drafts, by sequences

    // until the next time: a choice asks for each size many times
    mutable std::map<std::pair<int32_t, int32_t>, double> verify_estimates_, draft_estimates_;
};

} // namespace draftwood
