// See cost_curve.h.

#include "round/cost_curve.h"

#include <algorithm>
#include <numeric>

namespace draftwood {

namespace {

constexpr double new_weight = 0.3; // of new times in a mean that is known

} // namespace

void cost_curve::add_time(int32_t n, int64_t us, int32_t n_warmup) {
    if (n_warmed_up[n] < n_warmup) {
        n_warmed_up[n]++;
        return;
    }
    sum[n] += (double) us;
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
    if (curve_.n_warmed_up[n] >= n_warmup && n <= curve_.largest_known(last_)) {
        recent_[n_times_++ % n_recent] = (double) us / curve_.at(n);
    }
    curve_.add_time(n, us, n_warmup);
}

bool size_group::has_new_times() const {
    return std::any_of(&curve_.count[first_], &curve_.count[last_] + 1, [](int64_t n) { return n > 0; });
}

double size_group::ratio() const {
    double measured = 0.0, expected = 0.0;
    for (int32_t n = first_; n <= last_; ++n) {
        const int32_t known = curve_.largest_known(n);
        if (curve_.count[n] > 0 && known > 0) {
            measured += curve_.sum[n];
            expected += curve_.mean[known] * (double) curve_.count[n];
        }
    }
    return expected > 0.0 ? measured / expected : 1.0;
}

bool size_group::is_slower() const {
    const double longest = *std::max_element(recent_.begin(), recent_.end());
    const double others  = (std::accumulate(recent_.begin(), recent_.end(), 0.0) - longest) / (n_recent - 1);
    return n_times_ >= n_recent && others > 1.0 / load_change;
}

void size_group::update(bool use_minimum, double scale) {
    is_measured_ = is_measured_ || (has_new_times() && !use_minimum);
    n_times_     = 0;
    for (int32_t n = first_; n <= last_; ++n) {
        double & mean = curve_.mean[n];
        if (curve_.count[n] == 0) {
            mean *= scale;
            continue;
        }
        const double measured = use_minimum ? curve_.minimum[n] : curve_.sum[n] / (double) curve_.count[n];
        const double weight   = use_minimum ? (measured < mean ? 1.0 : 0.0) : new_weight;
        mean                  = mean == 0.0 || scale != 1.0 ? measured : mean + weight * (measured - mean);
        curve_.sum[n]         = 0.0;
        curve_.count[n]       = 0;
    }
}

} // namespace draftwood
