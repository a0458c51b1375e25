// llama-server's slots on our engine: one for each slot, in place of llama.cpp's drafting. Patched lines of
// server-context.cpp call this. A batch of the server is decoded in parts: each prompt's chunk, and before them all
// slots that generate, which draft and are verified together. The server samples each row with its own sampler.
// The server clears, copies, loads and cuts sequences by itself; each part says at which position it begins, and the
// engine goes there. If it cannot, the slot's text is evaluated anew. Must not know: requests, text. Test:
// tests/server.

#pragma once

#include "server/best_row.h"
#include "server/input_size.h"
#include "server/resolve.h"
#include "server/schedule.h"

#include "draftwood.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

struct common_params;

namespace draftwood {

class slot_rounds {
  public:
    // Makes an engine for each slot of `target`, which was made with `params`, if --spec-type asks for them. Returns
    // false, and logs why, if it does and they cannot be made.
    static bool make(const common_params & params, llama_context * target, std::unique_ptr<slot_rounds> & made);

    // The text of a slot, for one whose memory is not what the server takes it for. Empty: it has more than text.
    using text_of = std::function<std::vector<llama_token>()>;

    // a slot that generates
    struct asked {
        int32_t     slot;
        llama_token last;  // its newest token, which is not evaluated yet
        llama_pos   pos;   // of that token
        int32_t     n_max; // tokens that may be drafted
        float       temperature;
        bool        takes_best; // it samples the best token of a row, whatever came before
        text_of     text;
    };

    int32_t n_prompt_max() const { return n_ubatch_; } // tokens of one eval()

    // As llama_decode returns: 0; 1 without room; else the memory of these slots is unknown.
    // Evaluates a part of a slot's prompt at positions pos.. ; the last row has logits.
    int32_t eval(int32_t slot, const std::vector<llama_token> & tokens, llama_pos pos, const text_of & text);
    // Drafts for all and verifies them together. Each round is open then. n_drafted: tokens of each.
    int32_t begin_rounds(const std::vector<asked> & all, std::vector<int32_t> & n_drafted);

    // the row of logits to sample next: of the open round, else `otherwise`
    int32_t row(int32_t slot, int32_t otherwise) const;
    // What the slot takes of that row: what it sampled, but for benchmarks (--spec-synth-rates).
    llama_token taken(int32_t slot, llama_token sampled) const;
    // The slot took it.
    template <typename S> void took(S & slot, llama_token token);
    // After it was processed: true if another row is to be sampled. Else the round has ended; one without drafts is
    // kept open for the step behind it, until the slot's next round or its end.
    template <typename S> bool goes_on(S & slot);
    void                       end_round(int32_t slot);
    std::string                metrics() const; // of steps that were queued; from any thread

    // The drafters' part of what llama-server keeps of a slot. Without it drafts begin anew, and text stays as it is.
    // All drafters' context; nullptr: they have none.
    llama_context * drafter() const;
    // Puts a checkpoint of the slot's own text back. Returns false if the server has to.
    bool restore(int32_t slot, const std::vector<uint8_t> & state, llama_pos pos);
    // Slot `to` is about to become a copy of `from`.
    void copies(int32_t from, int32_t to);
    // In a file of the slot's file's name, in the folder "drafts" beside it.
    void save(int32_t slot, const std::string & path) const;
    void load(int32_t slot, const std::string & path) const;

  private:
    struct deleter {
        void operator()(dw_engine * engine) const { dw_engine_free(engine); }
    };
    struct seat {
        std::unique_ptr<dw_engine, deleter> engine;
        bool                                open     = false;
        size_t                              n_taken  = 0;                           // rows of the open round
        int32_t                             n_drafts = 0;                           // of it
        schedule                            accepts;                                // for benchmarks
        int64_t                             n_steps_taken = 0, n_steps_dropped = 0; // that are in the sums
    };

    slot_rounds() = default;
    bool      add_engine(const common_params & params, llama_context * target, dw_curve & curve);
    bool      accepts(int32_t slot, llama_token token); // true: the round goes on with it, a token that was drafted
    bool      has_row(int32_t slot) const;
    dw_status go_to(int32_t slot, llama_pos pos, const text_of & text);
    dw_status place(const asked & each);
    int64_t   n_drafted(int32_t slot) const;
    void      count_steps(seat & of);

    std::vector<seat> seats_; // [slot]
    int32_t           n_ubatch_  = 0;
    bool              recurrent_ = false; // checkpoints are of recurrent states
    int32_t           alone_     = 0;     // slot of the newest round of one: the only one that can have queued a step

    std::atomic<int64_t> n_taken_{ 0 }, n_dropped_{ 0 }; // steps, of all slots
};

template <typename S> void slot_rounds::took(S & slot, llama_token token) {
    const size_t depth = seats_[slot.id].n_taken;
    if (!accepts(slot.id, token)) {
        return;
    }
    slot.stats.n_draft_accepted++;
    slot.n_accepted_per_pos.resize(std::max(slot.n_accepted_per_pos.size(), depth + 1), 0);
    slot.n_accepted_per_pos[depth]++;
}

template <typename S> bool slot_rounds::goes_on(S & slot) {
    if (has_row(slot.id)) {
        slot.prompt.tokens.push_back(slot.sampled); // the row is this token's
        return true;
    }
    if (seats_[slot.id].n_drafts > 0) {
        end_round(slot.id);
    }
    return false;
}

// Embeddings, in or out, are the server's own.
template <typename Batch, typename Slots>
bool takes(const slot_rounds * dw, const Batch & batch, int32_t off, const Slots & slots) {
    const auto & slot = slots[batch.tokens[off].id_slot];
    return dw && !batch.has_embd && !(slot.task && slot.task->need_embd());
}

// Whether the part at `off` was a round, whose rows are there. A step may be queued behind them that nobody waits for.
template <typename Batch, typename Slots>
bool has_waited(const slot_rounds * dw, const Batch & batch, int32_t off, const Slots & slots) {
    return takes(dw, batch, off, slots) && !batch.tokens[off].is_prompt;
}

// Whether a row of the batch is in the part of n tokens from `off` on.
inline bool in_part(int32_t row, int32_t off, int32_t n) {
    return row >= off && row < off + n;
}

template <typename S> slot_rounds::text_of text_of_slot(const S & slot) {
    return [&slot] {
        const auto & tokens = slot.prompt.tokens;
        return tokens.has_mtmd ? std::vector<llama_token>() : tokens.get_text_tokens();
    };
}

// How many of the batch's tokens from `off` on, n_max at most, go into one decode.
template <typename Batch, typename Slots>
int32_t part(const slot_rounds * dw, const Batch & batch, int32_t off, int32_t n_max, const Slots & slots) {
    const int32_t n_left = std::min(n_max, batch.size() - off);
    if (!takes(dw, batch, off, slots)) {
        return n_left;
    }
    const auto &  first = batch.tokens[off];
    const int32_t most  = first.is_prompt ? std::min(n_left, dw->n_prompt_max()) : n_left;
    int32_t       n     = 1;
    while (n < most && batch.tokens[off + n].is_prompt == first.is_prompt &&
           (!first.is_prompt || batch.tokens[off + n].id_slot == first.id_slot)) {
        ++n;
    }
    return n;
}

// Decodes a part of n tokens. stock: as the server does without us.
template <typename Batch, typename Slots, typename F>
int32_t decode(slot_rounds * dw, const Batch & batch, int32_t off, int32_t n, Slots & slots, F stock) {
    if (!takes(dw, batch, off, slots)) {
        return stock();
    }
    const auto * rows = batch.tokens.data() + off;
    if (rows[0].is_prompt) {
        std::vector<llama_token> tokens;
        for (int32_t i = 0; i < n; ++i) {
            tokens.push_back(rows[i].token);
        }
        return dw->eval(rows[0].id_slot, tokens, rows[0].pos, text_of_slot(slots[rows[0].id_slot]));
    }
    std::vector<slot_rounds::asked> all;
    for (int32_t i = 0; i < n; ++i) {
        const auto & slot = slots[rows[i].id_slot];
        all.push_back({ slot.id, rows[i].token, rows[i].pos, std::max(0, slot.get_n_draft_max()),
                        slot.task->params.sampling.temp, takes_best(slot.task->params.sampling), text_of_slot(slot) });
    }
    std::vector<int32_t> n_drafted;
    const int32_t        rc = dw->begin_rounds(all, n_drafted);
    for (size_t i = 0; i < n_drafted.size(); ++i) {
        auto & stats = slots[all[i].slot].stats;
        stats.n_draft_tokens += n_drafted[i];
        stats.n_draft_verif_steps += n_drafted[i] > 0 ? 1 : 0;
    }
    return rc;
}

} // namespace draftwood
