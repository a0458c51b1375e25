// See slot_rounds.h.

#include "server/slot_rounds.h"

#include "common.h"
#include "log.h"
#include "server/counters.h"

#include <climits>
#include <filesystem>
#include <stdexcept>
#include <system_error>

namespace fs = std::filesystem;

namespace draftwood {

namespace {

int32_t as_llama_decode(dw_status status) {
    if (status == DW_OK) {
        return 0;
    }
    LOG_WRN("draftwood: %s\n", dw_last_error()); // here: the text is this thread's
    return status == DW_ERR_CONTEXT ? 1 : -3;
}

dw_stats stats_of(const dw_engine * engine) {
    dw_stats stats{};
    stats.struct_size = sizeof(stats);
    dw_get_stats(engine, &stats);
    return stats;
}

// A name that no other slot's file can have: such a file's name has no folder.
fs::path drafts_of(const std::string & path) {
    const fs::path file(path);
    return file.parent_path() / "drafts" / file.filename();
}

std::vector<llama_token> draft_of(dw_engine * engine) {
    std::vector<llama_token> tokens(DW_MAX_DRAFT);
    int32_t                  n = 0;
    tokens.resize(dw_get_draft(engine, tokens.data(), &n) == DW_OK ? (size_t) n : 0);
    return tokens;
}

} // namespace

bool slot_rounds::make(const common_params & params, llama_context * target, std::unique_ptr<slot_rounds> & made) {
    const dw_spec & dw = params.speculative.dw;
    set_most_tokens((int32_t) llama_n_ctx_seq(target));
    if (dw.type.empty()) {
        return true;
    }
    if (!dw.refusal.empty()) {
        LOG_ERR("draftwood: --spec-type %s cannot run: %s\n", dw.type.c_str(), dw.refusal.c_str());
        return false;
    }
    made.reset(new slot_rounds());
    made->n_ubatch_           = (int32_t) llama_n_ubatch(target);
    const llama_model * model = llama_get_model(target);
    made->recurrent_          = llama_model_is_hybrid(model) || llama_model_is_recurrent(model);
    dw_curve curve{}; // the first engine's, measured on an empty context
    for (int32_t i = 0; i < params.n_parallel; ++i) {
        if (!made->add_engine(params, target, curve)) {
            LOG_ERR("draftwood: --spec-type %s cannot run: %s\n", dw.type.c_str(), dw_last_error());
            made.reset();
            return false;
        }
        made->seats_.back().accepts = schedule(dw.rates, llama_model_get_vocab(model));
    }
    if (dw.drafter == DW_DRAFTER_NONE) {
        LOG_INF("draftwood: %d slots, no drafts (--spec-type %s)\n", params.n_parallel, dw.type.c_str());
    } else {
        const char * shared = params.n_parallel > 1 ? " each, on a card what 16 rows leave a slot" : "";
        LOG_INF("draftwood: %d slots draft as --spec-type %s, up to %d tokens%s\n", params.n_parallel, dw.type.c_str(),
                dw.draft_tokens, shared);
    }
    return true;
}

bool slot_rounds::add_engine(const common_params & params, llama_context * target, dw_curve & curve) {
    const dw_spec & dw = params.speculative.dw;
    dw_params       wanted;
    dw_params_init(&wanted);
    wanted.drafter      = dw.drafter;
    wanted.draft_tokens = std::max(1, dw.draft_tokens);
    wanted.draft_p_min  = params.speculative.draft.p_min;
    wanted.exact_rows   = INT32_MAX;
    wanted.drafter_path = dw.drafter == DW_DRAFTER_DFLASH ? dw.drafter_path.c_str() : nullptr;
    wanted.length       = dw.chooses ? DW_LENGTH_AUTO : DW_LENGTH_FIXED;
    wanted.tree_budget  = dw.tree_budget;
    wanted.seq_id       = (int32_t) seats_.size();
    wanted.results      = results_of_tests();
    wanted.queue_steps  = dw.queues_steps;
    wanted.begin_drafts = dw.begins_drafts;
    wanted.curve        = dw.chooses && !seats_.empty() ? &curve : nullptr;

    const llama_context_params context_params = common_context_params_to_llama(params);
    dw_engine *                engine         = nullptr;
    if (dw_engine_new(target, &context_params, &wanted, &engine) != DW_OK) {
        return false;
    }
    seats_.emplace_back();
    seats_.back().engine.reset(engine);
    if (dw.chooses && seats_.size() == 1) {
        curve.struct_size = sizeof(curve);
        dw_get_curve(engine, &curve);
    }
    return true;
}

int32_t slot_rounds::eval(int32_t slot, const std::vector<llama_token> & tokens, llama_pos pos, const text_of & text) {
    dw_status status = go_to(slot, pos, text);
    if (status == DW_OK) {
        status = dw_eval(seats_[slot].engine.get(), tokens.data(), (int32_t) tokens.size(), pos, /*all_logits*/ false);
    }
    return as_llama_decode(status);
}

// The server may have cut, copied or loaded the sequence since, or a decode has failed.
dw_status slot_rounds::go_to(int32_t slot, llama_pos pos, const text_of & text_of_slot) {
    dw_engine * engine = seats_[slot].engine.get();
    if (pos == 0) {
        return dw_reset(engine);
    }
    const dw_status status = dw_trim(engine, pos);
    if (status == DW_OK) {
        return DW_OK;
    }
    const std::vector<llama_token> text = text_of_slot();
    if ((llama_pos) text.size() < pos) {
        return text.empty() ? DW_OK : status; // dw_eval leaves room where images lie
    }
    LOG_WRN("draftwood: slot %d evaluates its %d tokens anew: %s\n", slot, pos, dw_last_error());
    dw_status again = dw_reset(engine);
    for (llama_pos at = 0; at < pos && again == DW_OK; at += n_ubatch_) {
        again = dw_eval(engine, text.data() + at, std::min(n_ubatch_, pos - at), at, /*all_logits*/ false);
    }
    return again;
}

dw_status slot_rounds::place(const asked & each) {
    dw_request_params request;
    dw_request_params_init(&request);
    request.temperature    = std::max(0.0f, each.temperature);
    request.n_top          = each.takes_best ? 1 : 0;
    const dw_status status = dw_set_request(seats_[each.slot].engine.get(), &request);
    return status == DW_OK ? go_to(each.slot, each.pos, each.text) : status;
}

int32_t slot_rounds::begin_rounds(const std::vector<asked> & all, std::vector<int32_t> & n_drafted) {
    std::vector<dw_engine *> engines;
    std::vector<llama_token> last;
    std::vector<int32_t>     n_max, n_found(all.size());
    std::vector<int64_t>     before;
    for (const asked & each : all) {
        if (const dw_status status = place(each); status != DW_OK) {
            return as_llama_decode(status);
        }
        engines.push_back(seats_[each.slot].engine.get());
        last.push_back(each.last);
        n_max.push_back(each.n_max);
        before.push_back(this->n_drafted(each.slot));
    }
    const int32_t n      = (int32_t) all.size();
    dw_status     status = n == 1 ? dw_propose(engines[0], last[0], n_max[0], n_found.data())
                                  : dw_propose_all(engines.data(), last.data(), n_max.data(), n_found.data(), n);
    if (status == DW_OK) {
        status = n == 1 ? dw_verify(engines[0]) : dw_verify_all(engines.data(), n);
    }
    if (status != DW_OK) {
        return as_llama_decode(status);
    }
    for (int32_t i = 0; i < n; ++i) {
        seat & each   = seats_[all[i].slot];
        each.open     = true;
        each.n_taken  = 0;
        each.n_drafts = n_found[i];
        if (each.accepts.on()) {
            each.accepts.begin(draft_of(each.engine.get()));
        }
        n_drafted.push_back((int32_t) (this->n_drafted(all[i].slot) - before[i]));
        count_steps(each);
    }
    count_steps(seats_[alone_]); // its step may have been dropped by this round
    alone_ = n == 1 ? all[0].slot : alone_;
    return 0;
}

int64_t slot_rounds::n_drafted(int32_t slot) const {
    return stats_of(seats_[slot].engine.get()).n_drafted;
}

bool slot_rounds::has_row(int32_t slot) const {
    return row(slot, -1) >= 0;
}

int32_t slot_rounds::row(int32_t slot, int32_t otherwise) const {
    int32_t row, n_past;
    return seats_[slot].open && dw_row(seats_[slot].engine.get(), &row, &n_past) == DW_OK ? row : otherwise;
}

llama_token slot_rounds::taken(int32_t slot, llama_token sampled) const {
    const seat & each = seats_[slot];
    return each.open && each.accepts.on() ? each.accepts.take(each.n_taken, sampled) : sampled;
}

bool slot_rounds::accepts(int32_t slot, llama_token token) {
    seat & each = seats_[slot];
    if (!each.open) {
        return false;
    }
    const auto took = each.accepts.on() ? dw_took_scheduled : dw_took;
    if (took(each.engine.get(), token) != DW_OK) {
        throw std::runtime_error(dw_last_error());
    }
    each.n_taken++;
    return has_row(slot);
}

void slot_rounds::end_round(int32_t slot) {
    seat & each = seats_[slot];
    if (each.open && dw_commit(each.engine.get()) != DW_OK) {
        LOG_ERR("draftwood: %s\n", dw_last_error());
    }
    each.open = false;
    count_steps(each);
}

// Others read the sums while an engine works.
void slot_rounds::count_steps(seat & of) {
    const dw_stats stats = stats_of(of.engine.get());
    n_taken_ += stats.n_queued_steps - of.n_steps_taken;
    n_dropped_ += stats.n_dropped_steps - of.n_steps_dropped;
    of.n_steps_taken   = stats.n_queued_steps;
    of.n_steps_dropped = stats.n_dropped_steps;
}

std::string slot_rounds::metrics() const {
    return counters_of_steps(n_taken_, n_dropped_);
}

llama_context * slot_rounds::drafter() const {
    llama_context * memory = nullptr;
    return dw_drafter_memory(seats_[0].engine.get(), &memory) == DW_OK ? memory : nullptr;
}

bool slot_rounds::restore(int32_t slot, const std::vector<uint8_t> & state, llama_pos pos) {
    if (!recurrent_) {
        return false;
    }
    if (dw_restore(seats_[slot].engine.get(), state.data(), state.size(), pos) != DW_OK) {
        LOG_WRN("draftwood: slot %d begins its drafts anew: %s\n", slot, dw_last_error());
        return false;
    }
    return true;
}

void slot_rounds::copies(int32_t from, int32_t to) {
    llama_context * memory = nullptr;
    const dw_status reset  = dw_reset(seats_[to].engine.get());
    if (dw_drafter_memory(seats_[from].engine.get(), &memory) != DW_OK || reset != DW_OK) {
        LOG_WRN("draftwood: slot %d drafts without the prompt of slot %d: %s\n", to, from, dw_last_error());
    }
}

void slot_rounds::save(int32_t slot, const std::string & path) const {
    const fs::path  file   = drafts_of(path);
    llama_context * memory = nullptr;
    std::error_code error;
    fs::remove(file, error); // of another text
    if (dw_drafter_memory(seats_[slot].engine.get(), &memory) != DW_OK) {
        LOG_WRN("draftwood: slot %d is saved without its drafts: %s\n", slot, dw_last_error());
        return;
    }
    if (!memory) {
        return;
    }
    fs::create_directory(file.parent_path(), error);
    if (llama_state_seq_save_file(memory, file.string().c_str(), slot, nullptr, 0) == 0) {
        LOG_WRN("draftwood: slot %d is saved without its drafts: %s could not be written\n", slot,
                file.string().c_str());
        fs::remove(file, error);
    }
}

void slot_rounds::load(int32_t slot, const std::string & path) const {
    const fs::path  file   = drafts_of(path);
    llama_context * memory = drafter();
    llama_token     none; // no pointer at all would ask for their number alone
    size_t          n_tokens;
    if (memory && llama_state_seq_load_file(memory, file.string().c_str(), slot, &none, 0, &n_tokens) == 0) {
        llama_memory_seq_rm(llama_get_memory(memory), slot, -1, -1); // what was read before it failed
        LOG_WRN("draftwood: slot %d begins its drafts anew: %s could not be read\n", slot, file.string().c_str());
    }
}

} // namespace draftwood
