// A part of the vocabulary that drafts are chosen from. It begins with the vocabulary's first tokens, which in a BPE
// vocabulary are the most frequent ones. Each token of the text that is missing replaces one that the text has not used
// of late. Must not know: models, tensors.
// Test: tests/unit/test_recent_vocab.py.

#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

namespace draftwood {

class recent_vocab {
  public:
    // of `size` tokens out of n_vocab, 1 to n_vocab
    recent_vocab(int32_t size, int32_t n_vocab) :
        tokens_(size),
        places_(n_vocab, -1),
        is_used_(size, false),
        hand_(size - 1) {
        std::iota(tokens_.begin(), tokens_.end(), 0);
        std::iota(places_.begin(), places_.begin() + size, 0);
    }

    int32_t size() const { return (int32_t) tokens_.size(); }
    int32_t token(int32_t place) const { return tokens_[place]; }
    // those of all places, for as long as this lives
    const int32_t * tokens() const { return tokens_.data(); }

    // The text has this token. Returns the place that was given to it, or -1 if it has one already. As in a clock, a
    // place is taken from a token that was not used since the hand passed it last. The hand starts at the end, among
    // the less frequent tokens.
    int32_t use(int32_t token) {
        if (places_[token] >= 0) {
            is_used_[places_[token]] = true;
            return -1;
        }
        while (is_used_[hand_]) {
            is_used_[hand_] = false;
            move_hand();
        }
        const int32_t place     = hand_;
        places_[tokens_[place]] = -1;
        places_[token]          = place;
        tokens_[place]          = token;
        is_used_[place]         = true;
        move_hand();
        return place;
    }

  private:
    void move_hand() { hand_ = hand_ > 0 ? hand_ - 1 : size() - 1; }

    std::vector<int32_t> tokens_;  // [place]
    std::vector<int32_t> places_;  // [token], -1: none
    std::vector<bool>    is_used_; // [place], since the hand passed
    int32_t              hand_;
};

} // namespace draftwood
