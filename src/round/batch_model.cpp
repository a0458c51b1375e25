// See batch_model.h.

#include "round/batch_model.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>

namespace draftwood {

namespace {

constexpr double  margin        = 1.02; // drafts must win by this, since times are not exact
constexpr double  least_weight  = 0.1;  // of a new time in a mean
constexpr double  speed_weight  = 0.2;  // of the newest time in the speed of the machine
constexpr double  most_change   = 2.0;  // of a time against its mean: what is more was held up
constexpr int32_t n_known       = 2;    // times until a mean counts as measured
constexpr int32_t plain_pause   = 256;  // rounds with drafts, until plain steps are timed again
constexpr int32_t trial_tokens  = 2;
constexpr int32_t first_pause   = 32; // rounds without drafts
constexpr int32_t last_pause    = 1024;
constexpr int32_t n_trial       = 2;   // rounds of a trial: the first one also catches up with what a drafter missed
constexpr double  more_on_cores = 0.5; // of a draft's time on a CPU that each further sequence adds, until measured
constexpr double  few_rows      = 3.0; // that take as long as a graph's weights, until measured: on a CPU
constexpr double  many_rows     = 64.0;

// how many of the members draft: all numbers of a few, then some
std::vector<int32_t> counts_up_to(int32_t n) {
    std::vector<int32_t> counts;
    for (int32_t k = 1; k < n; k += std::max(1, k / 4)) {
        counts.push_back(k);
    }
    counts.push_back(n);
    return counts;
}

} // namespace

batch_model::batch_model(int32_t n_warmup, bool shares_cores) :
    n_warmup_(n_warmup),
    shares_cores_(shares_cores),
    trials_(first_pause, last_pause, n_trial) {}

double batch_model::graph_rows() const {
    return shares_cores_ ? few_rows : many_rows;
}

// A machine that is slow now is slow for all sizes.
void batch_model::add(times & all, int32_t n_sequences, int32_t n, double us) {
    verify_estimates_.clear();
    draft_estimates_.clear();
    mean_time & here = all[{ n_sequences, n }];
    if (++here.count <= n_warmup_ || us <= 0.0) {
        return;
    }
    if (here.mean == 0.0) {
        here.mean = us / speed_;
        return;
    }
    const double change = std::clamp(us / here.mean, 1.0 / most_change, most_change);
    speed_ += speed_weight * (change - speed_);
    const double weight = std::max(least_weight, 1.0 / (here.count - n_warmup_));
    here.mean *= 1.0 + weight * (change / speed_ - 1.0);
}

void batch_model::add_verify(int32_t n_sequences, int32_t n_rows, double us) {
    add(verifies_, n_sequences, n_rows, us);
    if (n_rows == 1) {
        n_since_plain_[n_sequences] = 0;
    }
}

void batch_model::add_draft(int32_t n_sequences, int32_t n_tokens, double us) {
    add(drafts_, n_sequences, n_tokens, us);
}

void batch_model::add_commit(double us) {
    commit_us_ += least_weight * (us / speed_ - commit_us_);
}

// A size that was not measured is estimated from the nearest one that was, by the ratio of both in `alone`. If none
// was, `alone` is the estimate if it is in_micros; else 0.
double batch_model::at(const times & all, int32_t n_sequences, int32_t n, const shape & alone, bool in_micros) {
    const auto measured = all.find({ n_sequences, n });
    if (measured != all.end() && measured->second.mean > 0.0) {
        return measured->second.mean;
    }
    int32_t distance = INT32_MAX;
    double  ratio    = in_micros ? 1.0 : 0.0;
    for (const auto & [size, time] : all) {
        const auto [sequences, each] = size;
        const int32_t apart          = 100 * std::abs(sequences - n_sequences) + std::abs(each - n);
        if (time.mean > 0.0 && apart < distance) {
            distance = apart;
            ratio    = time.mean / alone(sequences, each);
        }
    }
    return ratio * alone(n_sequences, n);
}

double batch_model::verify(int32_t n_sequences, int32_t n_rows, const cost_model & solo) const {
    double & known = verify_estimates_[{ n_sequences, n_rows }];
    if (known == 0.0) {
        const bool in_micros = solo.verify_cost(1) > 0.0;
        known                = at(
            verifies_, n_sequences, n_rows,
            [&](int32_t sequences, int32_t rows) {
                return in_micros ? solo.verify_cost(sequences * rows) : graph_rows() + sequences * rows;
            },
            in_micros);
    }
    return known > 0.0 && n_rows > 1 ? known + n_sequences * commit_us_ : known;
}

double batch_model::draft(int32_t n_sequences, int32_t n_tokens, const cost_model & solo) const {
    double & known = draft_estimates_[{ n_sequences, n_tokens }];
    if (known == 0.0) {
        const bool in_micros = solo.draft_cost(n_tokens) > 0.0;
        known                = at(
            drafts_, n_sequences, n_tokens,
            [&](int32_t sequences, int32_t tokens) {
                const double more = shares_cores_ ? 1.0 + more_on_cores * (sequences - 1) : 1.0;
                return more * (in_micros ? solo.draft_cost(tokens) : tokens);
            },
            in_micros);
    }
    return known;
}

// Without the time of plain steps together the gain of drafts is not known.
bool batch_model::must_be_plain(int32_t n_sequences) {
    const mean_time & plain = verifies_[{ n_sequences, 1 }];
    return plain.count < n_warmup_ + n_known || n_since_plain_[n_sequences]++ > plain_pause;
}

batch_model::choice batch_model::evaluate(const std::vector<member> & members, std::vector<int32_t> n_tokens,
                                          const verify_time & time, const cost_model & solo) const {
    std::vector<int32_t> rows;
    double               tokens  = 0.0;
    int32_t              drafted = 0, longest = 0;
    for (size_t i = 0; i < members.size(); ++i) {
        const member & each = members[i];
        rows.push_back(each.fixed_rows > 0 ? each.fixed_rows : n_tokens[i] + 1);
        const int32_t n = std::min(rows[i], (int32_t) each.tokens.size()) - 1;
        tokens += each.tokens[n];
        if (n > 0 && each.by_drafter) {
            drafted++;
            longest = std::max(longest, n);
        }
    }
    const double verifying = time(rows), drafting = drafted > 0 ? draft(drafted, longest, solo) : 0.0;
    const bool   is_known = verifying > 0.0 && (drafted == 0 || drafting > 0.0);
    return { std::move(n_tokens), tokens, is_known ? verifying + drafting : 0.0 };
}

// For each length: the sequences that win most by a draft of it, and how many of them should have one.
batch_model::choice batch_model::fastest(const std::vector<member> & members, const verify_time & time,
                                         const cost_model & solo) const {
    std::vector<size_t> free;
    int32_t             longest = 0;
    for (size_t i = 0; i < members.size(); ++i) {
        if (members[i].fixed_rows == 0 && members[i].tokens.size() > 1) {
            free.push_back(i);
            longest = std::max(longest, (int32_t) members[i].tokens.size() - 1);
        }
    }
    const std::vector<int32_t> none(members.size(), 0);
    const auto                 whole = [&] {
        std::vector<int32_t> n_tokens = none;
        for (const size_t i : free) {
            n_tokens[i] = (int32_t) members[i].tokens.size() - 1;
        }
        return evaluate(members, std::move(n_tokens), time, solo);
    };
    choice best  = evaluate(members, none, time, solo);
    double speed = best.micros > 0.0 ? margin * best.tokens / best.micros : 0.0;
    for (int32_t n = 1; n <= longest; ++n) {
        const auto length = [&](size_t i) { return std::min(n, (int32_t) members[i].tokens.size() - 1); };
        const auto gain   = [&](size_t i) { return members[i].tokens[length(i)] - members[i].tokens[0]; };
        std::stable_sort(free.begin(), free.end(), [&](size_t a, size_t b) { return gain(a) > gain(b); });
        for (const int32_t k : counts_up_to((int32_t) free.size())) {
            std::vector<int32_t> n_tokens = none;
            std::for_each_n(free.begin(), k, [&](size_t i) { n_tokens[i] = length(i); });
            choice here = evaluate(members, std::move(n_tokens), time, solo);
            if (here.micros <= 0.0) { // what is not known is measured
                return whole();
            }
            if (here.tokens / here.micros > speed) {
                speed = here.tokens / here.micros;
                best  = std::move(here);
            }
        }
    }
    return best;
}

std::vector<int32_t> batch_model::choose(const std::vector<member> & members, const verify_time & time,
                                         const cost_model & solo) {
    std::vector<int32_t> n_tokens(members.size(), 0), trial(members.size(), 0);
    for (size_t i = 0; i < members.size(); ++i) {
        trial[i] = members[i].fixed_rows == 0 ? std::min(trial_tokens, (int32_t) members[i].tokens.size() - 1) : 0;
    }
    const bool can_draft = std::any_of(trial.begin(), trial.end(), [](int32_t n) { return n > 0; });
    const bool are_free =
        std::all_of(members.begin(), members.end(), [](const member & each) { return each.fixed_rows <= 1; });
    if (!can_draft || (are_free && must_be_plain((int32_t) members.size()))) {
        return n_tokens;
    }
    n_tokens           = fastest(members, time, solo).n_tokens;
    const bool chooses = std::any_of(n_tokens.begin(), n_tokens.end(), [](int32_t n) { return n > 0; });
    return trials_.next_round(chooses, /*is_available*/ true) ? trial : n_tokens;
}

} // namespace draftwood
