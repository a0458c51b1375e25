// Acceptance by a schedule, for benchmarks: which drafts a slot keeps is drawn, whatever the model samples. The rates
// are those of llama-server's --spec-synth-rates and --spec-synth-len. The text is not the model's then. Must not know:
// the engine. Test: tests/server/test_schedule.py.

#pragma once

#include "llama.h"

#include <cstdint>
#include <random>
#include <vector>

namespace draftwood {

class schedule {
  public:
    // rates[i]: how often a round keeps at least i + 1 drafts. Empty: the model decides.
    explicit schedule(std::vector<double> rates = {}) :
        rates_(std::move(rates)) {}

    bool on() const { return !rates_.empty(); }

    // A round of a slot begins with this chain of drafts.
    void begin(std::vector<llama_token> drafts) {
        const double drawn = std::uniform_real_distribution<double>()(draw_);
        drafts_            = std::move(drafts);
        n_kept_            = 0;
        while (n_kept_ < rates_.size() && n_kept_ < drafts_.size() && drawn < rates_[n_kept_]) {
            ++n_kept_;
        }
    }

    // What the slot takes at this depth in place of what was sampled: the draft, or another token than the draft.
    llama_token take(size_t depth, llama_token sampled) const {
        if (depth < n_kept_) {
            return drafts_[depth];
        }
        const bool by_chance = depth < drafts_.size() && drafts_[depth] == sampled;
        return by_chance ? (sampled > 0 ? sampled - 1 : 1) : sampled;
    }

  private:
    std::vector<double>      rates_;
    std::vector<llama_token> drafts_;
    size_t                   n_kept_ = 0;
    std::mt19937             draw_{ 1 };
};

} // namespace draftwood
