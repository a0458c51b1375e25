// See cost_model.h.

#include "round/cost_model.h"

#include <algorithm>
#include <cmath>

namespace draftwood {

namespace {

constexpr double  margin                 = 1.02; // drafting and branching must win by this, since times are not exact
constexpr double  catch_up_margin        = 1.08; // a drafter must win by this that first reads a prompt or a pause
constexpr double  dear_margin            = 1.3;  // and by this if that took much time for nothing of late
constexpr double  max_branch_probability = 0.25; // the chosen path is wrong half the time, and this branch right then
constexpr int32_t plain_trial            = 128;  // rounds with drafts, then a few without
constexpr double  longest_trial          = 4.0;  // plain steps: more is a graph that was built, or a long prompt
constexpr double  weight_of_trial        = 0.3;  // of the newest one in their mean
constexpr double  longest_pause          = 4096; // rounds, of a dear trial

const trial_rules & rules_on(bool is_cpu) {
    return is_cpu ? trials_on_cpu : trials_on_gpu;
}

} // namespace

cost_model::cost_model(int32_t n_warmup, bool shares_cores, bool copies_experts) :
    n_warmup_(n_warmup),
    shares_cores_(shares_cores),
    trials_{ trial_schedule(rules_on(shares_cores)), trial_schedule(rules_on(shares_cores)) },
    trial_steps_(copies_experts ? longest_trial : 0.0) {}

void cost_model::add_draft(int32_t n_tokens, int64_t us, bool is_whole) {
    waited_us_            = is_whole ? (double) us : 0.0;
    const double whole    = (double) us + aftermath_.cost();
    const double expected = draft_cost(n_tokens) * draft_group_.newest_ratio();
    catch_ups_.add_draft((double) us);
    if (aftermath_.catches_up()) {
        catch_ups_.add_catch_up((double) us - expected);
        return;
    }
    const bool returns = shares_cores_ && !aftermath_.is_behind_draft() && expected > 0.0;
    if (is_whole && returns) {
        aftermath_.add_return(whole, expected);
    }
    if (is_whole && (!returns || whole < expected)) {
        add_draft_time(n_tokens, std::llround(whole));
    }
}

// What a draft costs the round behind it is measured against the rounds before: the machine may be slow just now. If
// the drafter drafts in that round again, the cost is in that draft's own time.
void cost_model::add_round(bool drafted, int32_t n_rows, int64_t us) {
    const double expected = verify_cost(n_rows) * (n_rows > 1 ? verify_group_ : plain_group_).newest_ratio();
    const bool   is_cold  = shares_cores_ && aftermath_.is_behind_draft();
    if (is_cold && us > 0 && expected > 0.0) {
        aftermath_.add_excess(drafted ? expected : (double) us, expected);
    }
    const bool catches_up = !shares_cores_ && drafted && !aftermath_.is_behind_draft();
    if (us > 0 && (n_rows > 1 || !is_cold) && !(catches_up && waited_us_ == 0.0)) {
        add_verify_time(n_rows, us);
    }
    if (us > 0 && catches_up && tries_source_) {
        add_trial((double) us + (waited_us_ > 0.0 ? waited_us_ : draft_cost(n_rows - 1)));
    }
    catch_ups_.add_round(drafted, us > 0 ? (double) us : expected);
    aftermath_.end_round(drafted);
    waited_us_   = 0.0;
    tries_plain_ = tries_source_ = false;
}

// A trial by the drafter took `us`, with what it caught up.
void cost_model::add_trial(double us) {
    if (verify_cost(1) <= 0.0) {
        return;
    }
    const double steps = std::min(us / verify_cost(1), longest_trial);
    const double known =
        trial_steps_ > 0.0 ? trial_steps_ : round_cost(from_drafter, trials_on_gpu.n_tokens) / verify_cost(1);
    trial_steps_ = known + weight_of_trial * (steps - known);
}

double cost_model::verify_cost(int32_t n_rows) const {
    return std::max(verifies_.at(1), verifies_.at(n_rows));
}

// On a CPU a size that was timed while the machine was fast must not look cheaper than shorter ones.
double cost_model::draft_cost(int32_t n_tokens) const {
    const double here = drafts_.at(n_tokens);
    if (!shares_cores_ || here <= 0.0) {
        return here;
    }
    return std::max(here, *std::max_element(drafts_.mean.begin(), drafts_.mean.begin() + n_tokens + 1));
}

double cost_model::round_cost(draft_source source, int32_t n_tokens) const {
    const double drafting = source == from_drafter && n_tokens > 0 ? draft_cost(n_tokens) : 0.0;
    return verify_cost(n_tokens + 1) + drafting + (drafting > 0.0 ? aftermath_.cost_of_return() : 0.0);
}

bool cost_model::pays_to_branch(const draft_choice & chosen) const {
    const double  tokens = expected_tokens(chosen.source, chosen.n_tokens);
    const double  micros = round_cost(chosen.source, chosen.n_tokens);
    const int32_t n_rows = bucket(chosen.n_tokens + 2); // of the smallest tree
    if (chosen.n_tokens == 0 || micros <= 0.0 || n_rows > max_draft + 1) {
        return false;
    }
    const double more_tokens = max_branch_probability * (n_rows - chosen.n_tokens - 1);
    const double tree_micros = micros + verify_cost(n_rows) - verify_cost(chosen.n_tokens + 1);
    return (tokens + more_tokens) * micros > tokens * tree_micros;
}

int32_t cost_model::choose_tree_size(const draft_choice & chosen, const std::vector<double> & probabilities) const {
    const double micros   = round_cost(chosen.source, chosen.n_tokens);
    const double drafting = micros - verify_cost(chosen.n_tokens + 1);
    int32_t      best     = chosen.n_tokens + 1;
    double       tokens   = expected_tokens(chosen.source, chosen.n_tokens);
    double       speed    = margin * tokens / micros;
    for (int32_t i = 0; i < (int32_t) probabilities.size(); ++i) {
        const int32_t n_nodes = chosen.n_tokens + 2 + i;
        tokens += branches_.ratio() * probabilities[i];
        if (n_nodes > max_draft + 1) {
            break;
        }
        const double here = tokens / (drafting + verify_cost(bucket(n_nodes)));
        if (here > speed) {
            best  = n_nodes;
            speed = here;
        }
    }
    return best;
}

bool cost_model::must_catch_up() const {
    return shares_cores_ && aftermath_.catches_up();
}

bool cost_model::is_dear() const {
    return must_catch_up() && !catch_ups_.is_left();
}

// What gives the most expected tokens per microsecond; a plain step wins by the margin. Not known: a time is missing,
// and the first request measures with all that the source could draft.
draft_choice cost_model::fastest(const std::array<int32_t, n_draft_sources> & longest, bool & is_known) const {
    draft_choice best{ from_drafter, 0 };
    double       speed       = 0.0;
    is_known                 = false;
    const double must_win_by = is_dear() ? dear_margin : must_catch_up() ? catch_up_margin : 1.0; // the drafter
    for (const draft_source source : { from_drafter, from_ngrams }) {
        for (int32_t n = 0; n <= std::min(longest[source], max_draft); ++n) {
            const double micros = round_cost(source, n);
            if (micros <= 0.0) {
                return { source, longest[source] };
            }
            const double here =
                expected_tokens(source, n) / micros / (source == from_drafter && n > 0 ? must_win_by : 1.0);
            if (here > speed) {
                speed = here * (n == 0 ? margin : 1.0);
                best  = { source, n };
            }
        }
    }
    is_known = true;
    return best;
}

// Rounds as `best` whose time pays for what a trial of the source takes beyond them.
int32_t cost_model::pause_that_pays(draft_source source, const draft_choice & best) const {
    const trial_rules & by    = rules_on(shares_cores_);
    const double        known = source == from_drafter ? trial_steps_ * verify_cost(1) : 0.0;
    const double        takes = std::max(known, round_cost(source, by.n_tokens));
    const double        round = round_cost(best.source, best.n_tokens);
    const double        gives = expected_tokens(source, by.n_tokens) / expected_tokens(best.source, best.n_tokens);
    const double        more  = std::max(0.0, takes / round - gives); // rounds as `best`
    return by.time > 0.0 ? (int32_t) std::lround(std::min(more / by.time, longest_pause)) : 0;
}

draft_choice cost_model::choose(const std::array<int32_t, n_draft_sources> & longest) {
    const trial_rules & by      = rules_on(shares_cores_);
    tries_plain_                = false;
    tries_source_               = false;
    bool               is_known = false;
    const draft_choice best     = fastest(longest, is_known);
    if (!is_known) {
        return best;
    }
    n_drafts_in_a_row_ = best.n_tokens > 0 ? n_drafts_in_a_row_ + 1 : 0;
    n_plain_in_a_row_  = best.n_tokens > 0 ? 0 : n_plain_in_a_row_ + 1;
    if (n_drafts_in_a_row_ > plain_trial) {
        n_drafts_in_a_row_ %= plain_trial + by.n_plain;
        tries_plain_ = true;
        return { from_drafter, 0, tries_plain_ };
    }
    trial_comes_ = false;
    for (const draft_source source : { from_drafter, from_ngrams }) {
        const bool    is_chosen = best.n_tokens > 0 && best.source == source;
        const bool    may_try   = longest[source] > 0 && (source != from_drafter || !is_dear());
        const int32_t pause     = pause_that_pays(source, best);
        if (trials_[source].next_round(is_chosen, may_try, pause)) {
            tries_source_ = !shares_cores_;
            if (tries_source_) {
                records_[source].forget();
            }
            return { source, std::min(by.n_tokens, longest[source]), /*is_trial*/ true };
        }
        trial_comes_ |= trials_[source].is_next(may_try, pause);
    }
    return best;
}

void cost_model::add_acceptance(draft_source source, int32_t n_judged, int32_t n_accepted) {
    records_[source].add(n_judged, n_accepted, known_before(source));
    if (tries_source_ && n_judged > 0 && n_accepted == n_judged) {
        trials_[source].extend();
    }
    is_copying_ = tries_plain_ ? is_copying_ : source == from_ngrams && n_judged > 0 && n_accepted == n_judged;
}

void cost_model::add_branch_acceptance(const std::vector<double> & probabilities, int32_t n_accepted) {
    branches_.add(probabilities, n_accepted);
}

} // namespace draftwood
