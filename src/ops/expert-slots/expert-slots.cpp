// dw_expert_slots and dw_expert_guess on CPU, the reference: expert-slots.h, guess.h. One thread works; the slots are
// plain memory.

#include "ops/expert-slots/expert-slots.h"

#include "ops/expert-slots/guess.h"
#include "ops/expert-slots/policy.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <vector>

namespace dw::expert_slots {

namespace {

struct picks {
    const ggml_tensor * ids;
    int64_t             first, n_used; // of a row

    int64_t n_rows() const { return ids->ne[1]; }
    int32_t at(int64_t row, int64_t i) const {
        return *(const int32_t *) ((const char *) ids->data + row * ids->nb[1] + (first + i) * ids->nb[0]);
    }
};

struct chosen {
    int32_t last         = -1; // place of the last pick
    int32_t count        = 0;
    bool    by_first_row = false;
};

using chosen_experts = std::array<chosen, max_experts>;

chosen_experts count(const picks & of) {
    chosen_experts found;
    for (int64_t row = 0; row < of.n_rows(); ++row) {
        for (int64_t i = 0; i < of.n_used; ++i) {
            chosen & each = found[of.at(row, i)];
            each.last     = (int32_t) (row * of.n_used + i);
            each.count++;
            each.by_first_row |= row == 0;
        }
    }
    return found;
}

// the resident expert to go; -1: all are of this step
int32_t victim(const layer & of, const chosen_experts & now, uint32_t step) {
    int32_t  found = -1;
    uint64_t least = no_key;
    for (int32_t e = 0; e < of.n_experts; ++e) {
        const entry & each = of.state->entries[e];
        if (each.slot >= 0 && now[e].count == 0 && key_of(each, e, of.victims, step) < least) {
            least = key_of(each, e, of.victims, step);
            found = e;
        }
    }
    return found;
}

void copy(const layer & of, const fill & what) {
    for (int32_t p = 0; p < of.n_parts; ++p) {
        const part & each = of.parts[p];
        std::memcpy(each.base + of.slot_offset(each, what.slot), each.base + what.expert * each.stride, each.stride);
    }
}

// Missing experts of `now`, `most` at most, get the slots of victims, are copied there and listed in `fills`. Returns
// how many there was room for.
int32_t give_slots(const layer & of, const chosen_experts & now, uint32_t step, fill * fills, int32_t most) {
    table & state   = *of.state;
    int32_t n_given = 0;
    for (int32_t e = 0; e < of.n_experts && n_given < most; ++e) {
        if (now[e].count == 0 || state.entries[e].slot >= 0) {
            continue;
        }
        const int32_t out = victim(of, now, step);
        if (out < 0) {
            break;
        }
        std::swap(state.entries[e].slot, state.entries[out].slot);
        fills[n_given] = { e, state.entries[e].slot };
        copy(of, fills[n_given++]);
    }
    return n_given;
}

void resolve(const layer & of, const picks & from) {
    table &              state   = *of.state;
    const chosen_experts now     = count(from);
    const bool           looks   = only_looks_up(of, from.n_used, from.n_rows());
    const bool           warm_up = from.n_used >= of.n_experts;
    int32_t              n_hits = 0, n_all = 0, n_right = 0;
    state.n_fills = 0;
    state.step += looks ? 0 : 1;
    for (int32_t e = 0; e < of.n_experts; ++e) {
        n_all += now[e].count > 0;
        n_hits += now[e].count > 0 && state.entries[e].slot >= 0;
        n_right += now[e].count > 0 && !looks && state.entries[e].guessed == state.step;
    }
    if (!looks) {
        state.n_fills = give_slots(of, now, state.step, state.fills, max_experts);
    }
    for (int32_t e = 0; e < of.n_experts && !warm_up; ++e) {
        if (now[e].count > 0 && looks) {
            const uint64_t share = (uint64_t) heat_of_prompt * now[e].count / from.n_rows();
            add_heat(state.entries[e], epoch_of(state.step), (uint32_t) share);
        } else if (now[e].count > 0) {
            use(state.entries[e], state.step, now[e].last, now[e].by_first_row);
        }
    }
    state.counted.n_steps++;
    state.counted.n_hits += n_hits;
    state.counted.n_misses += state.n_fills;
    state.counted.n_in_place += n_all - n_hits - state.n_fills;
    state.counted.n_right += n_right;
}

// Missing ones of `now` are there for the step that comes.
void fetch(const layer & of, const chosen_experts & now) {
    table &        state = *of.state;
    const uint32_t step  = state.step + 1;
    state.n_guesses      = give_slots(of, now, step, state.guesses, max_guesses);
    for (int32_t i = 0; i < state.n_guesses; ++i) {
        state.entries[state.guesses[i].expert].guessed = step;
    }
    state.counted.n_guessed += (uint64_t) state.n_guesses;
}

void compute(ggml_tensor * dst, int ith, int, void *) {
    if (ith != 0) {
        return;
    }
    const layer & of = *(const layer *) layer_of(dst);
    const picks   from{ dst->src[ids], 0, dst->src[ids]->ne[0] };
    resolve(of, from);
    if (dst->src[guesses]) {
        fetch(*of.next, count({ dst->src[guesses], number_of(dst), from.n_used }));
    }
    auto * out = (int32_t *) dst->data;
    for (int32_t plane = 0; plane < of.n_planes; ++plane) {
        for (int64_t row = 0; row < from.n_rows(); ++row) {
            for (int64_t i = 0; i < from.n_used; ++i) {
                const int32_t expert = from.at(row, i);
                const int32_t slot   = of.state->entries[expert].slot;
                *out++               = slot < 0 ? expert : of.first_slots[plane] + slot;
            }
        }
    }
}

// the experts that each row would choose
chosen_experts guess(const layer & of, const ggml_tensor * node) {
    const ggml_tensor *  x      = node->src[hidden];
    const ggml_tensor *  w      = node->src[router];
    const auto *         scale  = (const float *) node->src[norm]->data;
    const int32_t        n_used = number_of(node);
    chosen_experts       found;
    std::vector<float>   logits(of.n_experts);
    std::vector<int32_t> order(of.n_experts);
    for (int64_t row = 0; row < x->ne[1]; ++row) {
        const auto * in = (const float *) ((const char *) x->data + row * x->nb[1]);
        for (int32_t e = 0; e < of.n_experts; ++e) {
            const auto * weights = (const float *) ((const char *) w->data + e * w->nb[1]);
            float        sum     = 0.0f;
            for (int64_t i = 0; i < x->ne[0]; ++i) {
                sum += weights[i] * scale[i] * in[i];
            }
            logits[e] = sum;
        }
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
        for (int32_t i = 0; i < n_used; ++i) {
            found[order[i]].count++;
        }
    }
    return found;
}

void compute_guess(ggml_tensor * dst, int ith, int, void *) {
    if (ith != 0) {
        return;
    }
    const layer & of = *(const layer *) layer_of(dst);
    fetch(of, guess(of, dst));
}

// the copies are done
void compute_ready(ggml_tensor *, int, int, void *) {}

} // namespace

const op_descriptor guess_on_cpu = { guess_signature, compute_guess, nullptr, nullptr, nullptr };

const op_descriptor ready_on_cpu = { ready_signature, compute_ready, nullptr, nullptr, nullptr };

const op_descriptor on_cpu = { signature, compute, nullptr, nullptr, nullptr };

} // namespace dw::expert_slots
