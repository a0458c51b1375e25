// See open_round.h.

#include "round/open_round.h"

#include <algorithm>
#include <cassert>

namespace draftwood {

void open_round::propose(int32_t root) {
    assert(!is_open());
    draft_      = {};
    draft_.tree = token_tree(root);
    state_      = round_state::proposed;
}

void open_round::drop_proposal() {
    assert(!is_open());
    state_ = round_state::idle;
}

void open_round::clear_rows() {
    rows_      = rows::none;
    first_row_ = n_rows_ = n_sampled_ = pos_ = 0;
    verify_us_                               = 0;
    path_.clear();
}

void open_round::drop_rows() {
    clear_rows();
    if (is_open()) {
        state_ = round_state::idle;
    }
}

void open_round::forget() {
    clear_rows();
    state_ = round_state::idle;
}

void open_round::verify_begins() {
    assert(state_ == round_state::proposed);
    forget();
}

void open_round::verify_again() {
    assert(state_ == round_state::idle);
    state_ = round_state::proposed;
}

void open_round::verified(int32_t first_row, int32_t n_rows, int32_t pos, int64_t us) {
    assert(state_ == round_state::idle && rows_ == rows::none);
    first_row_ = first_row;
    n_rows_    = n_rows;
    pos_       = pos;
    verify_us_ = us;
    path_      = { 0 };
    rows_      = rows::ready;
    state_     = round_state::walking;
}

void open_round::evaluated(int32_t token, int32_t row, int32_t pos) {
    assert(state_ == round_state::idle);
    clear_rows();
    draft_      = {};
    draft_.tree = token_tree(token);
    first_row_  = row;
    pos_        = pos;
    path_       = { 0 };
    rows_       = rows::ready;
}

int32_t open_round::node() const {
    assert(has_row());
    return path_[n_sampled_];
}

int32_t open_round::row() const {
    return first_row_ + node();
}

int32_t open_round::n_past() const {
    assert(has_row());
    return pos_ + n_sampled_ + 1;
}

void open_round::take_row() {
    assert(has_row());
    n_sampled_++;
}

void open_round::put_row_back() {
    if (has_row()) {
        n_sampled_--;
    }
}

bool open_round::step(int32_t token) {
    const bool    goes_on = state_ == round_state::walking;
    const int32_t child   = goes_on ? draft_.tree.child(path_.back(), token) : -1;
    if (child >= 0) {
        path_.push_back(child);
        return true;
    }
    rows_  = has_row() ? rows::sampled : rows_;
    state_ = goes_on ? round_state::ended : state_;
    return false;
}

int32_t open_round::last_row() const {
    assert(can_rewind());
    return first_row_ + path_[n_sampled_ - 1];
}

void open_round::rewind() {
    assert(can_rewind());
    n_sampled_--;
    path_.resize(n_sampled_ + 1); // the rows behind it are gone
    rows_ = rows::ready;
}

std::vector<int32_t> open_round::kept_path() const {
    assert(is_open());
    return { path_.begin(), path_.begin() + std::max(n_sampled_, 1) };
}

void open_round::close() {
    assert(is_open());
    rows_  = rows::sampled;
    state_ = round_state::idle;
}

} // namespace draftwood
