// See kept_states.h.

#include "drafters/kept_states.h"

namespace draftwood {

namespace {

// nullptr: the two do not share a device
row_copies copies_for(const results & from, row_copies of_gpu, ggml_backend_t reader) {
    if (ggml_backend_get_device(from.backend()) != ggml_backend_get_device(reader)) {
        return nullptr;
    }
    return from.on_gpu() ? of_gpu : copy_on_host;
}

} // namespace

kept_states::kept_states(results & from, row_copies copies, ggml_backend_t reader, int64_t width, int64_t n_waiting) :
    from_(from),
    copies_(copies_for(from, copies, reader)),
    reader_(reader),
    waiting_(reader, width, n_waiting),
    newest_(reader, width, 2) {}

void kept_states::begin() {
    const ggml_tensor * hidden   = from_.hidden().tensor;
    const bool          is_plain = hidden && hidden->ne[1] == 1; // no commit follows
    is_open_                     = copies_ && is_plain && waiting_.lies_beside(hidden);
    if (!is_open_) {
        reach();
        from_.wait_for(reader_);
    }
}

void kept_states::keep(int64_t to, int64_t row, int64_t n) {
    if (is_open_) {
        pieces_.push_back(waiting_.piece(to, from_.hidden().tensor, row, n));
    } else {
        waiting_.copy(to, from_.hidden(), row, n);
    }
}

void kept_states::keep_newest(int64_t row) {
    newest_at_ = 1 - newest_at_;
    if (is_open_) {
        pieces_.push_back(newest_.piece(newest_at_, from_.hidden().tensor, row, 1));
    } else {
        newest_.copy(newest_at_, from_.hidden(), row, 1);
    }
}

void kept_states::end() {
    if (is_open_) {
        launch();
        is_open_ = false;
    } else {
        from_.taken_by(reader_);
    }
}

void kept_states::drop() {
    pieces_.clear();
    is_open_ = false;
}

void kept_states::push_newest(int64_t to) {
    if (is_open_) {
        pieces_.push_back(waiting_.piece(to, newest_.tensor(), newest_at_, 1));
    } else {
        reach();
        waiting_.copy(to, newest_.tensor(), newest_at_, 1);
    }
}

void kept_states::move(int64_t to, int64_t row, int64_t n) {
    waiting_.copy(to, waiting_.tensor(), row, n);
}

void kept_states::launch() {
    if (pieces_.empty()) {
        return;
    }
    if (is_used_) {
        used_.record(reader_);
        used_.wait(from_.backend());
        is_used_ = false;
    }
    copies_(from_.backend(), pieces_.data(), (int) pieces_.size());
    written_.record(from_.backend());
    pieces_.clear();
    is_behind_ = true;
}

void kept_states::reach() {
    launch();
    if (is_behind_) {
        written_.wait(reader_);
        is_behind_ = false;
    }
    is_used_ = true;
}

std::vector<float> kept_states::newest() const {
    ggml_backend_synchronize(from_.backend());
    return newest_.get(newest_at_);
}

void kept_states::set_newest(const float * values) {
    reach();
    newest_.set(newest_at_, values);
}

} // namespace draftwood
