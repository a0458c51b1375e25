// See cost_curve.h.

#include "round/cost_curve.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace draftwood {

namespace {

constexpr double weight_of_one = 0.1;  // of one new time in a mean that is known
constexpr double most_weight   = 0.3;  // of three and more
constexpr double least_weight  = 0.05; // of the times of a round on a GPU, where the mean changes with each
constexpr double most_change   = 2.0;  // of a size at once: more was one round that was held up

} // namespace

void cost_curve::add_time(int32_t n, int64_t us, double speed, int32_t n_warmup) {
    if (n_warmed_up[n] < n_warmup) {
        n_warmed_up[n]++;
        return;
    }
    sum[n] += (double) us / speed;
    minimum[n] = count[n] == 0 ? (double) us : std::min(minimum[n], (double) us);
    count[n]++;
}

int32_t cost_curve::largest_known(int32_t n) const {
    while (n > 0 && mean[n] == 0.0) {
        --n;
    }
    return n;
}

double cost_curve::at(int32_t n) const {
    int32_t below = -1, above = -1, before = -1; // known sizes around n, and the one before `below`
    for (int32_t i = 0; i < n_sizes; ++i) {
        if (mean[i] == 0.0) {
            continue;
        }
        if (i <= n) {
            before = below;
            below  = i;
        } else if (above < 0) {
            above = i;
        }
    }
    if (below < 0) {
        return above < 0 ? 0.0 : mean[above] * n / above; // a line through the origin
    }
    if (below == n || (above < 0 && before < 0)) {
        return mean[below];
    }
    if (above < 0) {
        const double slope = std::max(0.0, (mean[below] - mean[before]) / (below - before));
        return mean[below] + slope * (n - below);
    }
    return mean[below] + (mean[above] - mean[below]) * (n - below) / (above - below);
}

void size_group::add_time(int32_t n, int64_t us, int32_t n_warmup) {
    const bool is_known = curve_.mean[n] > 0.0;
    const bool is_between =
        curve_.largest_known(last_) >= first_ && n <= curve_.largest_known(last_) && curve_.largest_known(n) > 0;
    if (curve_.n_warmed_up[n] >= n_warmup && is_between) {
        ratios_[n_times_++ % n_kept] = { (double) us / curve_.at(n), is_known };
    }
    curve_.add_time(n, us, follows_speed_ && is_known ? median(n_recent, /*known_only*/ true) : 1.0, n_warmup);
}

int64_t size_group::n_new_times() const {
    return std::accumulate(&curve_.count[first_], &curve_.count[last_] + 1, (int64_t) 0);
}

double size_group::median(int32_t n, bool known_only) const {
    std::vector<double> newest;
    for (int32_t i = n_times_ - 1; i >= std::max(0, n_times_ - n_kept) && (int32_t) newest.size() < n; --i) {
        if (ratios_[i % n_kept].is_known || !known_only) {
            newest.push_back(ratios_[i % n_kept].value);
        }
    }
    if (newest.empty()) {
        return 1.0;
    }
    std::sort(newest.begin(), newest.end());
    return (newest[(newest.size() - 1) / 2] + newest[newest.size() / 2]) / 2.0;
}

double size_group::ratio() const {
    if (is_slower()) {
        return median(n_recent, /*known_only*/ false);
    }
    const bool has_known = std::any_of(ratios_.begin(), ratios_.begin() + std::min(n_times_, n_kept),
                                       [](const time_ratio & each) { return each.is_known; });
    return median(n_kept, /*known_only*/ has_known);
}

bool size_group::is_slower() const {
    if (n_times_ < n_recent) {
        return false;
    }
    double sum = 0.0, longest = 0.0;
    for (int32_t i = n_times_ - n_recent; i < n_times_; ++i) {
        sum += ratios_[i % n_kept].value;
        longest = std::max(longest, ratios_[i % n_kept].value);
    }
    return (sum - longest) / (n_recent - 1) > 1.0 / load_change;
}

void size_group::forget(int32_t n) {
    curve_.sum[n]   = 0.0;
    curve_.count[n] = 0;
}

double size_group::weight_of_new(int32_t n) const {
    if (follows_speed_) {
        return std::min(most_weight, weight_of_one * (double) curve_.count[n]);
    }
    return std::max(least_weight, 1.0 / (n_updates_[n] + 2));
}

void size_group::update(double speed) {
    is_measured_ = is_measured_ || has_new_times();
    n_times_     = 0;
    speed_ *= speed;
    for (int32_t n = first_; n <= last_; ++n) {
        double & mean = curve_.mean[n];
        if (curve_.count[n] == 0) {
            mean *= speed;
            continue;
        }
        is_seen_[n]           = true;
        const double measured = curve_.sum[n] / (double) curve_.count[n];
        if (mean == 0.0) {
            mean = measured;
        } else {
            const double change = std::clamp(measured / mean, 1.0 / most_change, most_change);
            mean *= speed * (1.0 + weight_of_new(n) * (change - 1.0));
            n_updates_[n]++;
        }
        forget(n);
    }
}

void size_group::follow(double change) {
    double least = 0.0;
    for (int32_t n = first_; n <= last_; ++n) {
        double & mean = curve_.mean[n];
        if (is_seen_[n]) {
            least = std::max(least, mean);
        } else if (mean > 0.0) {
            mean = std::max(mean * change, least);
        }
    }
}

void size_group::update_minima() {
    n_times_   = 0;
    n_updates_ = {};
    is_seen_   = {};
    for (int32_t n = first_; n <= last_; ++n) {
        double & mean = curve_.mean[n];
        if (curve_.count[n] > 0) {
            mean = mean == 0.0 ? curve_.minimum[n] : std::min(mean, curve_.minimum[n]);
            forget(n);
        }
    }
}

} // namespace draftwood
