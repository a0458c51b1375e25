// How measured times enter the cost curve. See cost_model.h.

#include "round/cost_model.h"

#include <algorithm>
#include <limits>

namespace draftwood {

namespace {

constexpr int32_t n_settled    = 8;   // plain steps on a GPU that say how fast it is
constexpr double  small_change = 0.3; // of a new speed that is taken over at once, below load_change

} // namespace

void cost_model::add_draft_time(int32_t n_tokens, int64_t us) {
    draft_group_.add_time(std::min(n_tokens, max_draft), us, n_warmup_);
}

void cost_model::add_verify_time(int32_t n_rows, int64_t us) {
    (n_rows > 1 ? verify_group_ : plain_group_).add_time(std::min(n_rows, max_draft + 1), us, n_warmup_);
}

bool cost_model::is_outdated() const {
    return shares_cores_ && (plain_group_.is_slower() || verify_group_.is_slower() || draft_group_.is_slower());
}

bool cost_model::has_changed(const size_group & group) const {
    return group.ratio() < size_group::load_change || group.is_slower();
}

// The change of speed that all groups take over: that of the group with the most new times. Verifies or drafts whose
// load has changed are left out: a program that takes one of their cores leaves plain steps alone.
double cost_model::common_change() const {
    const size_group * lead = nullptr;
    for (const size_group * group : { &plain_group_, &verify_group_, &draft_group_ }) {
        const bool speaks_for_all = group == &plain_group_ || !has_changed(*group);
        if (speaks_for_all && group->n_new_times() > (lead ? lead->n_new_times() : 0)) {
            lead = group;
        }
    }
    if (!lead) {
        return 1.0;
    }
    return has_changed(*lead) ? lead->ratio() : std::min(lead->ratio(), 1.0 / size_group::load_change);
}

// If the load of a group has changed, all of its sizes follow at once. Otherwise they follow the machine, and beside it
// their own times slowly.
void cost_model::update(size_group & group, double common) {
    const double ratio = group.ratio();
    if (has_changed(group)) {
        group.update(ratio);
    } else {
        const double own = std::min(ratio, 1.0 / size_group::load_change) / common;
        group.update(common * (1.0 + small_change * (own - 1.0)));
    }
}

void cost_model::update_curve() {
    if (shares_cores_) {
        update_on_cpu();
    } else {
        update_on_gpu();
    }
}

// A group whose times are from model loading or a stored curve follows the others to faster ones: the machine was busy.
void cost_model::update_on_cpu() {
    const std::array<size_group *, 3> groups{ &plain_group_, &verify_group_, &draft_group_ };
    const double                      common  = common_change();
    double                            fastest = std::numeric_limits<double>::infinity();
    for (size_group * group : groups) {
        if (!group->has_new_times()) {
            group->update(common);
        } else {
            update(*group, common);
            fastest = std::min(fastest, group->speed());
        }
    }
    for (size_group * group : groups) {
        const double behind = fastest / group->speed();
        if (!group->is_measured() && behind < size_group::load_change) {
            group->update(behind);
        }
    }
}

// Each size has reasons of its own there: one round may find all of its experts, and the next none. But what plain
// steps take on text, against one token again and again at load, says something of sizes that were not seen since.
// Faster: the card was busy then. Slower: experts are missing, which does not concern drafts.
void cost_model::update_on_gpu() {
    for (size_group * group : { &plain_group_, &verify_group_, &draft_group_ }) {
        group->update(1.0);
    }
    if (plain_group_.n_updates(1) >= n_settled) {
        follow_plain_steps();
        plain_at_load_ = 0.0; // once since loading
    }
}

void cost_model::follow_plain_steps() {
    const double change = plain_at_load_ > 0.0 ? verifies_.mean[1] / plain_at_load_ : 1.0;
    if (change < size_group::load_change || change > 1.0 / size_group::load_change) {
        verify_group_.follow(change);
        draft_group_.follow(std::min(change, 1.0));
        plain_at_load_ = 0.0;
    }
}

void cost_model::update_curve_at_load() {
    for (size_group * group : { &plain_group_, &verify_group_, &draft_group_ }) {
        group->update_minima();
    }
    plain_at_load_ = verifies_.mean[1];
}

void cost_model::settle_curve() {
    if (!shares_cores_ && plain_group_.n_updates(1) > 0) {
        follow_plain_steps();
    }
}

void cost_model::get_curve(double * draft_us, double * verify_us) const {
    std::copy(drafts_.mean.begin(), drafts_.mean.end(), draft_us);
    std::copy(verifies_.mean.begin(), verifies_.mean.end(), verify_us);
}

void cost_model::set_curve(const double * draft_us, const double * verify_us) {
    std::copy_n(draft_us, drafts_.mean.size(), drafts_.mean.begin());
    std::copy_n(verify_us, verifies_.mean.size(), verifies_.mean.begin());
    for (size_group * group : { &plain_group_, &verify_group_, &draft_group_ }) {
        group->set_stored();
    }
    plain_at_load_ = verifies_.mean[1];
}

} // namespace draftwood
