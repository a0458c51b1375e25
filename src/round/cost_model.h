// Who drafts next, and how much: the drafter and length whose expected tokens a microsecond are most, 0 being plain
// decode.
// Pure arithmetic on counts and times, no llama types. Decisions depend on the cost curve, which only changes between
// requests (`refine`) or where it is far from the truth (`is_late`), and on acceptance counts, so that a request can be
// repeated.
// Test: tests/model/test_pace.py.

#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace draftwood {

class pace {
  public:
    static constexpr int32_t max_draft = 63;

    enum drafter : int32_t { asked = 0, ngram = 1, n_drafters = 2 };
    struct choice {
        drafter by;
        int32_t n; // tokens; 0: a plain step
    };

    // n_first: rounds of a size whose times say little, since its graphs are built then, and captured on a GPU.
    // shares_cores: verifies run on cores that other programs may take. A GPU's rounds are slow for other reasons:
    // where attention grows by a step, graphs of all sizes are built and captured again.
    pace(int32_t n_first, bool shares_cores) :
        n_first_(n_first),
        shares_cores_(shares_cores) {}

    // the next round's draft, where each drafter could give up to `longest` tokens
    choice choose(const std::array<int32_t, n_drafters> & longest);

    pace(const pace &)             = delete; // its kinds point to its curves
    pace & operator=(const pace &) = delete;

    // rounds of a size until its times count
    int32_t n_first() const { return n_first_; }

    // what a round took: a draft of n tokens by the drafter asked for (n-grams cost nothing), then a verify of n_rows;
    // microseconds. Enters the curve at refine().
    void drafted(int32_t n, int64_t us);
    void verified(int32_t n_rows, int64_t us);

    // Whether nodes beside the path chosen may be worth a row each, were they as probable as such nodes can be.
    bool pays_to_branch(const choice & chosen) const;
    // Nodes that a tree should have, root and the path chosen included, where further ones are accepted with these
    // probabilities (in the drafter's opinion, best first).
    int32_t widen(const choice & chosen, const std::vector<double> & beside) const;

    // a round had a draft whose most probable path was n tokens, of which the first n_accepted were taken
    void walked(drafter by, int32_t n, int32_t n_accepted);
    // and nodes beside it with these probabilities, of which n_found were taken
    void branched(const std::vector<double> & beside, int32_t n_found);
    // how often the token at this depth was taken where those before it were
    double acceptance(drafter by, int32_t depth) const;

    // Rounds of a kind have lately taken much longer than the curve says: other programs have the cores now, of which a
    // verify may use more than a plain step does. Then refine() should not wait for the next request.
    bool is_late() const;

    // take the times since the last call into the curve: their means, or the least of each size where they are few and
    // taken at load
    void refine(bool least = false);

    // the curve's means by size, 0 where not known; and one that another pace had
    void get(double * draft_us, double * verify_us) const; // f64[max_draft + 2] each
    void set(const double * draft_us, const double * verify_us);

    // microseconds of drafting n tokens by the drafter asked for; 0: not known yet
    double drafting(int32_t n) const { return draft_.at(n); }
    // expected microseconds of drafting n tokens and verifying them; 0: not known yet
    double cost(drafter by, int32_t n) const;
    // expected tokens of a round with a draft of n, bonus token included
    double tokens(drafter by, int32_t n) const;

  private:
    // a running mean by size, with what came since the last refine kept apart
    struct curve {
        std::array<double, max_draft + 2>  mean{}; // 0: never seen
        std::array<double, max_draft + 2>  sum{};
        std::array<double, max_draft + 2>  least{};
        std::array<int64_t, max_draft + 2> count{};
        std::array<int32_t, max_draft + 2> first{}; // of the rounds that say little, how many were there

        void    add(int32_t n, int64_t us, int32_t n_first);
        double  at(int32_t n) const;      // interpolated between sizes seen, extended by the last slope
        int32_t largest(int32_t n) const; // size seen up to n; 0: none
    };

    // Sizes of a curve whose times change together, beside other programs: plain steps, verifies, drafts.
    struct kind {
        static constexpr int32_t n_lately = 8;

        curve & times;
        int32_t first, last;

        std::array<double, n_lately> lately{}; // newest times over the curve's
        int32_t                      n_times  = 0;
        bool                         measured = false; // here, not in another process

        void   add(int32_t n, int64_t us, int32_t n_first);
        bool   seen() const;  // since the last refine
        double ratio() const; // times since the last refine over the curve's
        bool   late() const;  // the newest few took much longer
        void   refine(bool use_least, double by);
    };

    static constexpr double  margin         = 1.02; // that drafting must win by, since times are never quite right
    static constexpr int32_t first_patience = 16;   // rounds without a drafter before it is tried; doubles each time
    static constexpr int32_t last_patience  = 256;

    struct record {
        std::array<double, max_draft + 1> reached{};    // [depth] drafts that came to it, older ones weighing less
        std::array<double, max_draft + 1> accepted{};   // of those, accepted
        int32_t                           n_idle   = 0; // rounds it could have drafted in since it last did
        int32_t                           patience = first_patience;
        int32_t                           n_trial  = 0; // rounds left of its trial; the first one also catches up
    };

    double rows(int32_t n) const;         // microseconds of verifying them: more never cost less
    double change(const kind & of) const; // ratio(), where that is much; else 1

    int32_t n_first_;
    bool    shares_cores_;

    double beside_expected_ = 0.0; // nodes beside the path that should have been taken,
    double beside_found_    = 0.0; // and that were; older ones weigh less

    curve draft_;  // of the drafter asked for, by tokens drafted
    curve verify_; // by rows
    kind  plain_{ verify_, 0, 1 };
    kind  verifies_{ verify_, 2, max_draft + 1 };
    kind  drafts_{ draft_, 0, max_draft + 1 };

    std::array<record, n_drafters> records_{};
};

} // namespace draftwood
