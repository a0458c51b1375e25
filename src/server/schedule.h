// Acceptance by a schedule, for benchmarks: which drafts a slot keeps is drawn, whatever the model samples. The rates
// are those of llama-server's --spec-synth-rates and --spec-synth-len. The text is not the model's then. It does not
// end before the model ends it: a draft that would is not kept. Must not know: the engine. Test:
// tests/server/test_schedule.py.

#pragma once

#include "llama.h"

#include <cstdint>
#include <random>
#include <vector>

namespace draftwood {

class schedule {
  public:
    // rates[i]: how often a round keeps at least i + 1 drafts. Empty: the model decides.
    explicit schedule(std::vector<double> rates = {}, const llama_vocab * vocab = nullptr) :
        rates_(std::move(rates)),
        vocab_(vocab) {}

    bool on() const { return !rates_.empty(); }

    // A round of a slot begins with this chain of drafts.
    void begin(std::vector<llama_token> drafts) {
        const double drawn = std::uniform_real_distribution<double>()(draw_);
        drafts_            = std::move(drafts);
        n_kept_            = 0;
        while (n_kept_ < rates_.size() && n_kept_ < drafts_.size() && drawn < rates_[n_kept_] &&
               !llama_vocab_is_eog(vocab_, drafts_[n_kept_])) {
            ++n_kept_;
        }
    }

    // What the slot takes at this depth in place of what was sampled: the draft, or another token than the draft.
    llama_token take(size_t depth, llama_token sampled) const {
        if (depth < n_kept_) {
            return drafts_[depth];
        }
        const bool by_chance = depth < drafts_.size() && drafts_[depth] == sampled;
        return by_chance && !llama_vocab_is_eog(vocab_, sampled) ? other_than(sampled) : sampled;
    }

  private:
    llama_token other_than(llama_token token) const {
        do {
            token = (token + 1) % llama_vocab_n_tokens(vocab_);
        } while (llama_vocab_is_eog(vocab_, token));
        return token;
    }

    std::vector<double>      rates_;
    const llama_vocab *      vocab_; // there, where there are rates
    std::vector<llama_token> drafts_;
    size_t                   n_kept_ = 0;
    std::mt19937             draw_{ 1 };
};

} // namespace draftwood
