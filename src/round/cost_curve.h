// Measured times by size: microseconds by tokens drafted, or by rows verified.
// Plain arithmetic. Must not know: engines, llama types. Test: tests/unit/test_cost_curve.py.

#pragma once

#include "tree/token_tree.h"

#include <array>
#include <cstdint>

namespace draftwood {

// Sizes 0 to max_tree_nodes. New times are kept apart until size_group::update() takes them into the means.
struct cost_curve {
    static constexpr int32_t n_sizes = max_tree_nodes + 1;

    std::array<double, n_sizes>  mean{}; // microseconds; 0: not known
    std::array<double, n_sizes>  sum{};  // of new times, each divided by its speed
    std::array<double, n_sizes>  minimum{};
    std::array<int64_t, n_sizes> count{};
    std::array<int32_t, n_sizes> n_warmed_up{}; // discarded rounds of a size

    // Add a time, taken while the machine took `speed` times what the curve says. The first n_warmup times of a size
    // are discarded: graphs are built then, and captured on a GPU.
    void add_time(int32_t n, int64_t us, double speed, int32_t n_warmup);

    // Interpolate between known sizes. Beyond the largest known size, continue the last slope if it is positive.
    // 0 if no size is known.
    double at(int32_t n) const;

    int32_t largest_known(int32_t n) const; // size up to n; 0: none
};

// Sizes of a curve whose times change together: plain steps, verifies, drafts. A machine's speed changes from second to
// second, so a time says two things: how fast the machine is now, which all sizes share, and how this size compares
// with the others.
class size_group {
  public:
    // follows_speed: a time is compared with those around it. False on a GPU, where each size has reasons of its own.
    size_group(cost_curve & curve, int32_t first, int32_t last, bool follows_speed) :
        curve_(curve),
        first_(first),
        last_(last),
        follows_speed_(follows_speed) {}

    void add_time(int32_t n, int64_t us, int32_t n_warmup);

    bool    has_new_times() const { return n_new_times() > 0; }
    int64_t n_new_times() const;

    // Whether requests gave times. Those of model loading and of a stored curve may come from a busier machine.
    bool is_measured() const { return is_measured_; }
    void set_stored() {
        is_measured_ = false;
        speed_       = 1.0;
        n_updates_   = {};
        is_seen_     = {};
    }

    // times that a mean moved since loading
    int32_t n_updates(int32_t n) const { return n_updates_[n]; }

    // What the means were multiplied by since loading, or since set_stored().
    double speed() const { return speed_; }

    // Median of new times over the curve's: of the newest 8 if is_slower(), else of those of the newest 64 whose sizes
    // have a mean, if there are any. 1 without new times.
    double ratio() const;

    // The same of the newest 8 whose sizes have a mean: how fast the machine is now.
    double newest_ratio() const { return median(n_recent, /*known_only*/ true); }

    // Whether the newest 8 rounds, the longest one left out, took over 1.67 times what the curve says.
    bool is_slower() const;

    // Multiply all means by `speed`. Those of sizes with new times also move towards these; on a CPU each of these was
    // compared with the 8 times up to it. A size without a mean takes the mean of its new times. On a GPU the first
    // updates since loading weigh more: a model that copies missing experts is slower on a text than on the tokens of
    // loading.
    void update(double speed);

    // Multiply the means of sizes that were not timed since loading; but none gets less than a smaller one that was.
    void follow(double change);

    // Take the least of the new times of a size, if that is less than its mean: for the few of model loading.
    void update_minima();

    // A ratio below which, or whose inverse above which, the machine's load has changed.
    static constexpr double load_change = 0.6;

  private:
    static constexpr int32_t n_recent = 8;
    static constexpr int32_t n_kept   = 64;

    // A new time over the curve's, which lies between two known sizes if this one has no mean.
    struct time_ratio {
        double value;
        bool   is_known;
    };

    double median(int32_t n, bool known_only) const; // of the newest n; 1: there are none
    double weight_of_new(int32_t n) const;           // times of a size
    void   forget(int32_t n);                        // new times of a size

    cost_curve & curve_;
    int32_t      first_, last_;
    bool         follows_speed_;

    std::array<time_ratio, n_kept> ratios_{};
    int32_t                        n_times_ = 0;

    std::array<int32_t, cost_curve::n_sizes> n_updates_{}; // since loading
    std::array<bool, cost_curve::n_sizes>    is_seen_{};   // timed since loading

    bool   is_measured_ = false;
    double speed_       = 1.0;
};

} // namespace draftwood
