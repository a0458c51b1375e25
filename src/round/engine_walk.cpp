// The walk over what a round verified, a sample at each step: see engine.h.

#include "round/engine.h"
#include "round/timer.h"

#include <algorithm>
#include <array>

namespace draftwood {

namespace {

void require_choice(const llama_token_data_array & left) {
    if (left.selected < 0) {
        fail(DW_ERR_ARGUMENT, "the sampler chose no token; expected a chain that ends in a choice");
    }
}

} // namespace

bool engine::row(int32_t & row, int32_t & n_past) const {
    if (!walk_.alive) {
        return false;
    }
    row    = walk_.first_row + walk_.path[walk_.n_sampled];
    n_past = walk_.pos + walk_.n_sampled + 1;
    return true;
}

llama_token engine::walk_on(llama_sampler * sampler, const bool * accept) {
    if (!walk_.alive) {
        fail(DW_ERR_STATE, "dw_next without a row to sample; call dw_propose and dw_verify, or dw_eval");
    }
    timer t(stats_.t_sample_us);
    settle();
    const int32_t i      = walk_.n_sampled;
    const int32_t node   = walk_.path[i];
    const int32_t n_past = n_past_;
    // taken before it is sampled: a logits processor that saves the state ends the round through on_flush
    walk_.n_sampled = i + 1;
    n_past_         = walk_.pos + i + 1;
    llama_token token;
    try {
        token = sample(sampler, node);
        token = accept ? scheduled(node, *accept, token) : token;
    } catch (...) {
        if (walk_.alive) {
            walk_.n_sampled = i;
            n_past_         = n_past;
        }
        throw;
    }
    const int32_t child = walk_.alive && walk_.open ? tree_.child(node, token) : -1;
    walk_.alive         = child >= 0;
    stats_.n_emitted++;
    if (walk_.alive) {
        walk_.path.push_back(child);
        stats_.n_accepted++;
        stats_.accepted_at[i]++;
    }
    return token;
}

// What a schedule makes of a sample: the child on the likeliest path, or a token that no child has.
llama_token engine::scheduled(int32_t node, bool accept, llama_token sampled) const {
    const std::vector<int32_t> spine = tree_.spine();
    const auto                 here  = std::find(spine.begin(), spine.end(), node);
    const bool                 more  = here != spine.end() && here + 1 != spine.end();
    if (accept && walk_.open && more) {
        return tree_.tokens[*(here + 1)];
    }
    while (tree_.child(node, sampled) >= 0) {
        sampled = sampled > 0 ? sampled - 1
                              : llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(sequence_.target()))) - 1;
    }
    return sampled;
}

// From the target's distribution at a node.
llama_token engine::sample(llama_sampler * sampler, int32_t node) {
    const int32_t row = walk_.first_row + node;
    if (n_enough_ > 0 && n_enough_ <= dw_n_top && sequence_.context().left().has_top()) {
        return sample_top(sampler, row);
    }
    stats_.n_logits_rows++;
    return llama_sampler_sample(sampler, sequence_.target(), row);
}

// From the best tokens of a row alone, in the order of their logits.
llama_token engine::sample_top(llama_sampler * sampler, int32_t row) {
    const top_row                          top = sequence_.context().left().top(row);
    std::array<llama_token_data, dw_n_top> best;
    for (size_t i = 0; i < best.size(); ++i) {
        best[i] = { top.tokens[i], top.logits[i], 0.0f };
    }
    llama_token_data_array left{ best.data(), best.size(), -1, /*sorted*/ true };
    llama_sampler_apply(sampler, &left);
    require_choice(left);
    const llama_token token = left.data[left.selected].id;
    llama_sampler_accept(sampler, token);
    return token;
}

void engine::rewind() {
    if (walk_.open || walk_.n_sampled < 1 || n_past_ != walk_.pos + walk_.n_sampled || sequence_.end() != n_past_) {
        fail(DW_ERR_STATE, "no logits of this engine's last decode stand for position %d; evaluate a token first",
             n_past_);
    }
    walk_.n_sampled--;
    walk_.path.resize(walk_.n_sampled + 1); // the rows behind it are gone
    walk_.alive = true;
}

} // namespace draftwood
