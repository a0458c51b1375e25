// How long the next draft should be: see pace.h.

#include "round/cost_model.h"

#include "tree/token_tree.h"

#include <algorithm>
#include <numeric>

namespace draftwood {

namespace {

constexpr double memory       = 0.98; // weight of a round against the one after it
constexpr double prior        = 0.75; // acceptance before anything is known,
constexpr double prior_count  = 2.0;  // as if seen so often
constexpr double new_weight   = 0.3;  // of new times in a mean that is known
constexpr int    trial        = 2;    // rounds
constexpr double most_beside  = 0.25; // of a node beside the path: the token is another one half the time, and this one
constexpr double beside_count = 2.0;  // nodes, as if found as often as expected
constexpr double much         = 0.6;  // of a time for another: one of them was taken beside other work

} // namespace

void pace::curve::add(int32_t n, int64_t us, int32_t n_first) {
    if (first[n] < n_first) {
        first[n]++;
        return;
    }
    sum[n] += (double) us;
    least[n] = count[n] == 0 ? (double) us : std::min(least[n], (double) us);
    count[n]++;
}

void pace::kind::add(int32_t n, int64_t us, int32_t n_first) {
    if (times.first[n] >= n_first && n <= times.largest(last)) {
        lately[n_times++ % n_lately] = (double) us / times.at(n);
    }
    times.add(n, us, n_first);
}

bool pace::kind::seen() const {
    return std::any_of(&times.count[first], &times.count[last] + 1, [](int64_t n) { return n > 0; });
}

// A size that was never seen takes as long as the next smaller one, at least.
double pace::kind::ratio() const {
    double now = 0.0, then = 0.0;
    for (int32_t n = first; n <= last; ++n) {
        if (times.count[n] > 0) {
            now += times.sum[n];
            then += times.mean[times.largest(n)] * (double) times.count[n];
        }
    }
    return then > 0.0 ? now / then : 1.0;
}

// One round that was held up makes no busy machine.
bool pace::kind::late() const {
    const double longest = *std::max_element(lately.begin(), lately.end());
    const double others  = (std::accumulate(lately.begin(), lately.end(), 0.0) - longest) / (n_lately - 1);
    return n_times >= n_lately && others > 1.0 / much;
}

// Where all times changed by much, those of sizes that were not seen are taken to have changed alike.
void pace::kind::refine(bool use_least, double by) {
    const bool seen_now = seen();
    for (int32_t n = first; n <= last; ++n) {
        double & mean = times.mean[n];
        if (times.count[n] > 0) {
            const double now = use_least ? times.least[n] : times.sum[n] / (double) times.count[n];
            mean             = mean == 0.0 || by != 1.0 ? now : mean + new_weight * (now - mean);
            times.sum[n]     = 0.0;
            times.count[n]   = 0;
        } else {
            mean *= by;
        }
    }
    measured = measured || seen_now;
    n_times  = 0;
}

int32_t pace::curve::largest(int32_t n) const {
    while (n > 0 && mean[n] == 0.0) {
        --n;
    }
    return n;
}

double pace::curve::at(int32_t n) const {
    // the seen sizes below and above; beyond the last one, the two below
    int32_t low = -1, high = -1, lower = -1;
    for (int32_t i = 0; i < (int32_t) mean.size(); ++i) {
        if (mean[i] == 0.0) {
            continue;
        }
        if (i <= n) {
            lower = low;
            low   = i;
        } else if (high < 0) {
            high = i;
        }
    }
    if (low == n || high < 0) {
        if (low < 0 || low == n || lower < 0) {
            return low < 0 ? 0.0 : mean[low];
        }
        const double slope = std::max(0.0, (mean[low] - mean[lower]) / (low - lower));
        return mean[low] + slope * (n - low);
    }
    if (low < 0) {
        return mean[high] * n / high; // through nothing for nothing
    }
    return mean[low] + (mean[high] - mean[low]) * (n - low) / (high - low);
}

void pace::drafted(int32_t n, int64_t us) {
    drafts_.add(std::min(n, max_draft), us, n_first_);
}

void pace::verified(int32_t n_rows, int64_t us) {
    (n_rows > 1 ? verifies_ : plain_).add(std::min(n_rows, max_draft + 1), us, n_first_);
}

bool pace::is_late() const {
    return shares_cores_ && (plain_.late() || verifies_.late());
}

double pace::change(const kind & of) const {
    return of.ratio() < much || (shares_cores_ && of.late()) ? of.ratio() : 1.0;
}

// A kind whose times are another process's follows the others to faster ones: they were taken beside other work.
void pace::refine(bool least) {
    const std::array<kind *, 3> kinds{ &plain_, &verifies_, &drafts_ };
    double                      faster = 1.0;
    for (const kind * each : kinds) {
        faster = std::min(faster, change(*each));
    }
    for (kind * each : kinds) {
        const double by = each->seen() ? change(*each) : each->measured ? 1.0 : faster;
        each->refine(least, least ? 1.0 : by);
    }
}

void pace::get(double * draft_us, double * verify_us) const {
    std::copy(draft_.mean.begin(), draft_.mean.end(), draft_us);
    std::copy(verify_.mean.begin(), verify_.mean.end(), verify_us);
}

void pace::set(const double * draft_us, const double * verify_us) {
    std::copy_n(draft_us, draft_.mean.size(), draft_.mean.begin());
    std::copy_n(verify_us, verify_.mean.size(), verify_.mean.begin());
    plain_.measured = verifies_.measured = drafts_.measured = false;
}

double pace::rows(int32_t n) const {
    return std::max(verify_.at(1), verify_.at(n));
}

double pace::cost(drafter by, int32_t n) const {
    return rows(n + 1) + (by == asked && n > 0 ? draft_.at(n) : 0.0);
}

double pace::acceptance(drafter by, int32_t depth) const {
    const record & seen = records_[by];
    return (seen.accepted[depth] + prior * prior_count) / (seen.reached[depth] + prior_count);
}

bool pace::pays_to_branch(const choice & chosen) const {
    const double  micros = cost(chosen.by, chosen.n);
    const int32_t next   = bucket(chosen.n + 2); // the cheapest tree
    return chosen.n > 0 && micros > 0.0 && next <= max_draft + 1 &&
           (tokens(chosen.by, chosen.n) + most_beside * (next - chosen.n - 1)) * micros >
               tokens(chosen.by, chosen.n) * (micros + rows(next) - rows(chosen.n + 1));
}

int32_t pace::widen(const choice & chosen, const std::vector<double> & beside) const {
    const double right    = (beside_found_ + beside_count) / (beside_expected_ + beside_count);
    const double drafting = cost(chosen.by, chosen.n) - rows(chosen.n + 1);
    int32_t      best     = chosen.n + 1;
    double       gained   = tokens(chosen.by, chosen.n);
    double       speed    = margin * gained / cost(chosen.by, chosen.n);
    for (int32_t i = 0; i < (int32_t) beside.size(); ++i) {
        const int32_t n = chosen.n + 2 + i;
        gained += right * beside[i];
        if (n <= max_draft + 1 && gained / (drafting + rows(bucket(n))) > speed) {
            best  = n;
            speed = gained / (drafting + rows(bucket(n)));
        }
    }
    return best;
}

double pace::tokens(drafter by, int32_t n) const {
    double expected = 1.0;
    double path     = 1.0;
    for (int32_t depth = 0; depth < n; ++depth) {
        path *= acceptance(by, depth);
        expected += path;
    }
    return expected;
}

pace::choice pace::choose(const std::array<int32_t, n_drafters> & longest) {
    choice best{ asked, 0 };
    double speed = 0.0;
    for (const drafter by : { asked, ngram }) {
        for (int32_t n = 0; n <= std::min(longest[by], max_draft); ++n) {
            const double micros = cost(by, n);
            if (micros <= 0.0) {
                return { by, longest[by] }; // no times yet: the first request measures
            }
            if (tokens(by, n) / micros > speed) {
                speed = tokens(by, n) / micros * (n == 0 ? margin : 1.0);
                best  = { by, n };
            }
        }
    }
    for (const drafter by : { asked, ngram }) {
        record & seen = records_[by];
        if (best.n > 0 && best.by == by) {
            seen.n_idle   = 0;
            seen.patience = first_patience;
        } else if (longest[by] > 0 && ++seen.n_idle > seen.patience) { // the text may have changed its kind
            seen.n_idle   = 0;
            seen.patience = std::min(2 * seen.patience, last_patience);
            seen.n_trial  = trial;
        }
        if (longest[by] > 0 && seen.n_trial > 0) {
            seen.n_trial--;
            return { by, std::min(2, longest[by]) };
        }
    }
    return best;
}

void pace::walked(drafter by, int32_t n, int32_t n_accepted) {
    record & seen = records_[by];
    for (int32_t depth = 0; depth < std::min(n, max_draft); ++depth) {
        if (depth > n_accepted) {
            break; // never came to it
        }
        seen.reached[depth]  = memory * seen.reached[depth] + 1.0;
        seen.accepted[depth] = memory * seen.accepted[depth] + (depth < n_accepted ? 1.0 : 0.0);
    }
}

void pace::branched(const std::vector<double> & beside, int32_t n_found) {
    beside_expected_ *= memory;
    beside_found_ = memory * beside_found_ + n_found;
    for (const double each : beside) {
        beside_expected_ += each;
    }
}

} // namespace draftwood
