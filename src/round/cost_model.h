// Who drafts in the next round, and how much: the source and length with the most expected tokens per microsecond.
// Length 0 is a plain step. Parts: cost_curve.h (times), acceptance.h, trials.h, draft_aftermath.h.
// Plain arithmetic on counts and times. Must not know: engines, llama types.
// A decision depends on the cost curve, on acceptance counts, on whether the last draft of n-grams was accepted whole,
// on how many rounds came since a trial, and on what trials took. On a CPU the curve changes between requests
// (update_curve), or within one if it is outdated (is_outdated), and a decision also depends on what drafts cost of
// late beyond the curve. On a GPU the curve changes with each round: what missing experts take depends on the text.
// Tests: tests/unit/test_cost_model.py, test_cost_curve.py, test_draft_aftermath.py, through draftwood-testing.h;
// tests/model/test_auto_length.py.

#pragma once

#include "round/acceptance.h"
#include "round/catch_up_budget.h"
#include "round/cost_curve.h"
#include "round/draft_aftermath.h"
#include "round/trials.h"

#include <array>
#include <cstdint>
#include <vector>

namespace draftwood {

enum draft_source : int32_t { from_drafter = 0, from_ngrams = 1, n_draft_sources = 2 };

struct draft_choice {
    draft_source source;
    int32_t      n_tokens;         // 0: a plain step
    bool         is_trial = false; // to learn a time or the acceptance; another choice would be faster
};

class cost_model {
  public:
    static constexpr int32_t max_draft            = acceptance_record::max_draft;
    static constexpr int32_t least_plain_in_a_row = 16; // rounds: a step that nobody takes costs its time

    // n_warmup: rounds of a size whose times are discarded.
    // shares_cores: verifies run on cores that other programs may take. False on a GPU, whose rounds are slow for other
    // reasons: where attention grows by a step, graphs of all sizes are built and captured again.
    // copies_experts: the card does not hold all experts. So a trial by the drafter counts as the longest one until
    // some were timed, since it reads other experts than the text, beside what the drafter missed.
    cost_model(int32_t n_warmup, bool shares_cores, bool copies_experts);

    cost_model(const cost_model &)             = delete; // its groups refer to its curves
    cost_model & operator=(const cost_model &) = delete;

    // Choose the next draft. longest: tokens that each source could draft. On a CPU a drafter that would first have to
    // catch up with many tokens must win by 8 % over n-grams, by 10 over a plain step. If that took more than 0.5 % of
    // the time of late without 16 rounds of drafts after it, it must win by 30 %, and has no trials.
    // While times are unknown: all that the first source with an unknown time could draft.
    // Plain steps follow 128 rounds with drafts, to know how fast they are now: one on a GPU, two on a CPU, of which
    // the second one is timed. With many engines on one context their times are not known, and the rounds are lost.
    // A source that is not chosen has trials (trials.h). On a CPU one has two rounds of two tokens. On a GPU it has one
    // token and goes on while that is accepted. Pauses there are so long that trials take 0.5 % of the time.
    draft_choice choose(const std::array<int32_t, n_draft_sources> & longest);

    // Whether the next round is expected to be a plain step: the last 16 were, and no trial is due. A card may then
    // begin with it.
    bool plain_step_comes() const { return n_plain_in_a_row_ >= least_plain_in_a_row && !trial_comes_; }

    // The length of this round was chosen for several sequences, not by choose(): a trial has ended.
    void others_choose() {
        tries_plain_ = tries_source_ = false;
        n_plain_in_a_row_            = 0;
    }

    int32_t n_warmup() const { return n_warmup_; }
    bool    shares_cores() const { return shares_cores_; }

    // A draft of n tokens by the drafter took so many microseconds (n-grams cost nothing). Not counted if it first had
    // to catch up with many tokens. On a CPU it is charged with what it costs the round behind it; and where it is not
    // behind another draft, what it takes more is kept apart (draft_aftermath.h).
    // is_whole: it has as many tokens as were asked for. The time of another one is no time of n_tokens.
    void add_draft(int32_t n_tokens, int64_t us, bool is_whole = true);
    // A round verified n_rows; the verify and the commit took `us`; 0: not known. drafted: by the drafter. On a CPU a
    // plain step behind a draft is not counted: it takes longer than those of a pause. On a GPU a draft behind a pause
    // that stays on the card is not counted: the drafter first catches up, in the time of the verify.
    void add_round(bool drafted, int32_t n_rows, int64_t us);
    // Where the text grew: by a round's tokens before add_round, or by a prompt's.
    void add_tokens(int32_t n) { aftermath_.add_tokens(n); }
    // A prompt was evaluated: what n-grams were right about may be another text.
    void begin_text() { is_copying_ = false; }

    // Times as they are. They enter the curve at update_curve().
    void add_draft_time(int32_t n_tokens, int64_t us);
    void add_verify_time(int32_t n_rows, int64_t us);

    // Whether branches may be worth a row each, if they were as probable as branches can be.
    bool pays_to_branch(const draft_choice & chosen) const;
    // How many nodes a tree should have, root and chosen path included. probabilities: of its branches by the drafter,
    // best first.
    int32_t choose_tree_size(const draft_choice & chosen, const std::vector<double> & probabilities) const;

    // A round judged the first n_judged tokens of a draft's most probable path, and accepted the first n_accepted.
    // A plain step ends a draft of n-grams that was right to its end, unless it was a trial.
    void add_acceptance(draft_source source, int32_t n_judged, int32_t n_accepted);
    // A round had branches with these probabilities, of which n_accepted were accepted.
    void add_branch_acceptance(const std::vector<double> & probabilities, int32_t n_accepted);
    // Probability that the token at this depth, 0 the first, is accepted if those before it are.
    double acceptance(draft_source source, int32_t depth) const {
        return records_[source].rate(known_before(source) + depth);
    }

    // Whether plain steps, verifies or drafts have become much slower than the curve says: other programs have the
    // cores, of which a verify may use more than a plain step. Then update_curve() should not wait for the next
    // request.
    bool is_outdated() const;

    // Take the times since the last call into the curve.
    void update_curve();
    // The same of the few times that are measured at load: the minimum of each size.
    void update_curve_at_load();
    // Before the curve is kept for another model: on a GPU sizes that were not seen since loading follow plain steps,
    // as they do after 8 of these if they take under 0.6 or over 1.67 of what they took at load.
    void settle_curve();

    // The curve by size, f64[max_draft + 2] each, 0 if not known. set_curve takes one that another model had.
    void get_curve(double * draft_us, double * verify_us) const;
    void set_curve(const double * draft_us, const double * verify_us);

    double verify_cost(int32_t n_rows) const;  // microseconds; never less than a plain step; 0: unknown
    double draft_cost(int32_t n_tokens) const; // microseconds by the drafter; 0: unknown
    double cost_behind_draft() const { return aftermath_.cost(); }        // microseconds, of the draft's cost
    double cost_of_return() const { return aftermath_.cost_of_return(); } // microseconds, of the next draft
    double round_cost(draft_source source,
                      int32_t      n_tokens) const; // expected microseconds, verify included; 0: unknown
    // of a round with a draft of n_tokens, the bonus token included
    double expected_tokens(draft_source source, int32_t n_tokens) const {
        return records_[source].expected_tokens(n_tokens, known_before(source));
    }

  private:
    // Depth at which a draft of the source begins. After n-grams that were accepted whole the next ones go on from
    // there.
    int32_t known_before(draft_source source) const { return source == from_ngrams && is_copying_ ? 1 : 0; }

    int32_t      pause_that_pays(draft_source source, const draft_choice & best) const;
    void         add_trial(double us);
    void         update_on_cpu();
    void         update_on_gpu();
    void         follow_plain_steps();
    bool         must_catch_up() const;                       // with earlier tokens, before the next draft
    bool         is_dear() const;                             // catching up took much time for nothing of late
    bool         has_changed(const size_group & group) const; // the machine's load
    double       common_change() const;
    void         update(size_group & group, double common);
    draft_choice fastest(const std::array<int32_t, n_draft_sources> & longest, bool & is_known) const;

    int32_t n_warmup_;
    bool    shares_cores_;

    cost_curve drafts_;   // by tokens
    cost_curve verifies_; // by rows
    size_group plain_group_{ verifies_, 0, 1, shares_cores_ };
    size_group verify_group_{ verifies_, 2, max_draft + 1, shares_cores_ };
    size_group draft_group_{ drafts_, 0, max_draft + 1, shares_cores_ };

    std::array<acceptance_record, n_draft_sources> records_{};
    bool                                           is_copying_ = false; // the last draft was of n-grams, and all right
    std::array<trial_schedule, n_draft_sources>    trials_;
    double          trial_steps_; // plain steps that a drafter's trial on a GPU takes, catching up too; 0: not known
    double          waited_us_     = 0.0; // that the round's draft took, if it was waited for
    double          plain_at_load_ = 0.0; // microseconds
    branch_record   branches_;
    int32_t         n_drafts_in_a_row_ = 0;     // rounds
    int32_t         n_plain_in_a_row_  = 0;     // rounds whose best choice was a plain step
    bool            trial_comes_       = false; // in the next round
    bool            tries_plain_       = false; // the newest choice is a plain step, to time it
    bool            tries_source_      = false; // it is a trial of a source, on a GPU
    draft_aftermath aftermath_;
    catch_up_budget catch_ups_;
};

} // namespace draftwood
