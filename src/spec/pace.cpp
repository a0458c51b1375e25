// How long the next draft should be: see pace.h.

#include "pace.h"

#include "token_tree.h"

#include <algorithm>

namespace draftwood {

namespace {

constexpr double memory       = 0.98; // weight of a round against the one after it
constexpr double prior        = 0.75; // acceptance before anything is known,
constexpr double prior_count  = 2.0;  // as if seen so often
constexpr double new_weight   = 0.3;  // of new times in a mean that is known
constexpr int    trial        = 2;    // rounds
constexpr double most_beside  = 0.25; // of a node beside the path: the token is another one half the time, and this one
constexpr double beside_count = 2.0;  // nodes, as if found as often as expected
constexpr double much_faster  = 0.6;  // of the old time: then the old one was taken beside other work

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

void pace::curve::refine(bool use_least, double speed) {
    const bool was_busy = speed < much_faster;
    for (size_t n = 0; n < mean.size(); ++n) {
        if (count[n] > 0) {
            const double now = use_least ? least[n] : sum[n] / (double) count[n];
            mean[n]          = mean[n] == 0.0 || was_busy ? now : mean[n] + new_weight * (now - mean[n]);
            sum[n]           = 0.0;
            count[n]         = 0;
        } else if (was_busy) {
            mean[n] *= speed;
        }
    }
}

double pace::curve::now_to_then() const {
    double now = 0.0, then = 0.0;
    for (size_t n = 0; n < mean.size(); ++n) {
        if (count[n] > 0 && mean[n] > 0.0) {
            now += sum[n];
            then += mean[n] * (double) count[n];
        }
    }
    return then > 0.0 ? now / then : 1.0;
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
    draft_.add(std::min(n, max_draft), us, n_first_);
}

void pace::verified(int32_t n_rows, int64_t us) {
    verify_.add(std::min(n_rows, max_draft + 1), us, n_first_);
}

// Times taken beside other work are too long for all sizes alike: once the sizes seen now say so, the others follow.
void pace::refine(bool least) {
    const double speed = least ? 1.0 : verify_.now_to_then();
    draft_.refine(least, speed);
    verify_.refine(least, speed);
}

void pace::get(double * draft_us, double * verify_us) const {
    std::copy(draft_.mean.begin(), draft_.mean.end(), draft_us);
    std::copy(verify_.mean.begin(), verify_.mean.end(), verify_us);
}

void pace::set(const double * draft_us, const double * verify_us) {
    std::copy_n(draft_us, draft_.mean.size(), draft_.mean.begin());
    std::copy_n(verify_us, verify_.mean.size(), verify_.mean.begin());
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
