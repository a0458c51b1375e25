// DFlash block drafting: see dflash.h.

#include "drafters/dflash.h"

#include "llama/facts.h"
#include "llama/memory.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace draftwood {

namespace {

constexpr int32_t n_waiting_max = 256; // tokens whose features may wait: a copy of this many is cheaper than a decode
constexpr int32_t n_round_max   = 128; // of these, where all are of rounds
constexpr int32_t n_on_cpu      = 64;  // the same: so many rows fit a core's cache, and a draft reads them all

// part of a token's probability that counts beside the most probable path: the block was made for that path
constexpr float off_spine = 0.3f;

} // namespace

dflash_drafter::dflash_drafter(target_context & target, const llama_context_params & context_params,
                               const dw_params & params) :
    target_(target),
    shared_(target.shared<dflash_context>(
        drafter_key("dflash", params) + params.drafter_path,
        [&] { return std::make_shared<dflash_context>(target, context_params, params); })),
    ctx_(shared_->ctx),
    seq_(params.seq_id),
    n_embd_(llama_model_n_embd(llama_get_model(target.get()))),
    drafted_(ctx_.newest_results().backend(), ctx_.attached().copies),
    features_(ctx_.newest_results().backend(), (int64_t) shared_->layers.size() * n_embd_,
              llama_n_ubatch(target.get()) + n_waiting_max + max_tree_nodes),
    begins_(params.begin_drafts && shared_->ahead) {
    ctx_.remove_from(seq_, 0);                    // cells of an earlier drafter of this sequence
    for (const int32_t layer : shared_->layers) { // taps come last, so a throw leaves none behind
        target.attached().tap_layer((uint32_t) layer, true);
    }
}

dflash_drafter::~dflash_drafter() {
    ctx_.remove_from(seq_, 0); // in a unified cache the others need the cells
    for (const int32_t layer : shared_->layers) {
        target_.attached().tap_layer((uint32_t) layer, false);
    }
}

// Features wait until a draft needs them. A prompt's are fed when there are too many. In a long pause the older ones
// are given up, so that it costs no decodes: the block then sees the prompt and the newest of the text.
void dflash_drafter::observe(const kept_rows & kept) {
    ctx_.see(kept.tokens, kept.n);
    is_begun_ = take_begun(kept);
    if (is_begun_) {
        return;
    }
    trim(kept.pos);
    if (end() != kept.pos) { // a loaded state, an image
        feed();
        leave_gap(kept.pos);
    }
    take_features(kept.rows, kept.n);
    n_waiting_ += kept.n;
    has_prompt_ = has_prompt_ || kept.is_prompt;
    if (n_waiting_ > n_waiting_max && has_prompt_) {
        feed();
    } else if (const int32_t most = target_.newest_results().on_gpu() ? n_round_max : n_on_cpu;
               n_waiting_ > most && !has_prompt_) {
        const int32_t n_newest = most / 2;
        features_.copy(0, features_.tensor(), n_waiting_ - n_newest, n_newest);
        leave_gap(end() - n_newest);
        n_waiting_ = n_newest;
    }
}

// Rows of the target's newest decode wait behind those that do.
void dflash_drafter::take_features(const int32_t * rows, int32_t n) {
    target_.newest_results().wait_for(features_.backend());
    std::vector<result_rows> inputs;
    for (const int32_t layer : shared_->layers) {
        inputs.push_back(target_.newest_results().layer_input(layer));
        if (!inputs.back().tensor && !inputs.back().host) {
            fail(DW_ERR_INTERNAL, "the target kept no inputs of its layer %d", layer);
        }
    }
    features_.copy_side_by_side(n_waiting_, inputs, rows, n, ctx_.attached().copies);
    target_.newest_results().taken_by(features_.backend());
}

// The block does not see the positions up to `pos` that were not fed. Without M-RoPE llama.cpp takes no positions
// behind a gap, so that all before it go, too.
void dflash_drafter::leave_gap(llama_pos pos) {
    if (!shared_->takes_gaps) {
        ctx_.remove_from(seq_, 0);
    }
    n_fed_ = pos;
}

// for rows from n_fed_ on, in one decode
bool dflash_drafter::has_room_for(int32_t n_rows) const {
    return n_rows <= (int32_t) llama_n_ubatch(ctx_.get()) && n_fed_ + n_rows <= ctx_.n_positions() &&
           n_rows <= free_cells(ctx_.get(), seq_);
}

// What a round accepted is padded to one of a few sizes, so that its graph is kept. The rows beyond it are cut off
// again. Its rows are marked as outputs, since only graphs of such rows are kept (graph_store.h). This graph computes
// no logits.
void dflash_drafter::feed() {
    for (int32_t first = 0; first < n_waiting_;) {
        const int32_t  n   = std::min(n_waiting_ - first, (int32_t) llama_n_ubatch(ctx_.get()));
        const bool     few = n <= max_tree_nodes && has_room_for(bucket(n));
        decode_request request;
        request.slot = few ? drafter_context::slot(graph_kind::own_features, seq_) : 0;
        ctx_.batch().clear();
        add_features(request, first, n, few ? bucket(n) : n, few);
        const int32_t rc = ctx_.decode(request);
        if (rc != 0) {
            fail(DW_ERR_DECODE, "llama_decode returned %d for the features of %d tokens at position %d", rc, n, n_fed_);
        }
        first += n;
        n_fed_ += n;
        ctx_.remove_from(seq_, n_fed_);
    }
    fed();
}

// Adds n_rows rows to the batch. The first n are waiting features, from `first` on. The others are zero.
void dflash_drafter::add_features(decode_request & to, int32_t first, int32_t n, int32_t n_rows, bool output) {
    const ggml_tensor * reader = feature_projection(shared_->model.get());
    const int64_t       at = ctx_.batch().size(), zeros = features_.tensor()->ne[1] - max_tree_nodes;
    to.feeds.push_back(features_.feed(row_feed::hidden, at, first, n, reader));
    if (n < n_rows) {
        to.feeds.push_back(features_.feed(row_feed::hidden, at + n, zeros, n_rows - n, reader));
    }
    for (int32_t i = 0; i < n_rows; ++i) {
        ctx_.batch().add_fed(n_fed_ + i, output, seq_);
    }
}

// what waited is in the cache
void dflash_drafter::fed() {
    n_waiting_  = 0;
    has_prompt_ = false;
}

int32_t dflash_drafter::guesses(const draft_request & request) const {
    const int32_t n = std::min(request.depth, shared_->block_size - 1);
    return request.pos == 0 || end() != request.pos || request.pos + n >= ctx_.n_positions() ? 0 : n;
}

void dflash_drafter::add_block(const draft_request & request, int32_t n) {
    for (int32_t i = 0; i <= n; ++i) {
        ctx_.batch().add(i == 0 ? request.last : shared_->mask, request.pos + i, /*output*/ true, seq_);
    }
}

draft_result dflash_drafter::draft(const draft_request & request, token_tree & tree) {
    const int32_t n = guesses(request);
    if (n == 0) {
        return draft_result::cold;
    }
    feed();
    ctx_.batch().clear();
    add_block(request, n);
    decode_request block;
    block.slot         = drafter_context::slot(graph_kind::own_block, seq_);
    const bool decoded = ctx_.decode(block) == 0;
    if (decoded && request.ahead) {
        leave_chain(request, n, tree);
    } else if (decoded && request.budget > 0) {
        read_tree(request, n, tree);
    } else if (decoded) {
        read_chain(request, n, /*first_row*/ 0, tree);
    }
    ctx_.remove_from(seq_, request.pos); // the block itself is no context
    if (!decoded) {
        return draft_result::failed;
    }
    return std::exchange(is_begun_, false) ? draft_result::begun : draft_result::drafted;
}

// row i of the block, which begins in first_row of the decode, guesses the token i further on
void dflash_drafter::read_chain(const draft_request & request, int32_t n, int32_t first_row, token_tree & tree) {
    float path = 1.0f;
    for (int32_t i = 1; i <= n; ++i) {
        const likeliest best = ctx_.best(first_row + i, path, request.p_min);
        if (best.path < request.p_min) {
            break;
        }
        path = best.path;
        tree.add(i - 1, best.token, std::log(path));
    }
}

void dflash_drafter::read_tree(const draft_request & request, int32_t n, token_tree & tree) {
    std::vector<std::vector<candidate>> positions;
    for (int32_t i = 1; i <= n; ++i) {
        positions.push_back(ctx_.candidates(i, request.temperature));
    }
    tree = tree_from_positions(request.last, positions, request.budget, request.spine, std::log(off_spine));
}

void dflash_drafter::trim(llama_pos n_keep) {
    forget_begun();
    if (n_keep < end()) {
        n_waiting_ = std::max(n_keep - n_fed_, 0);
    }
    if (n_keep < n_fed_) {
        ctx_.remove_from(seq_, n_keep);
        n_fed_ = n_keep;
    }
}

llama_context * dflash_drafter::memory() {
    forget_begun();
    try {
        feed();
    } catch (const failure &) { // a part may be in the cache
        reset();
        throw;
    }
    return ctx_.get();
}

void dflash_drafter::reset() {
    ctx_.remove_from(seq_, 0);
    n_begun_    = 0;
    is_begun_   = false;
    n_waiting_  = 0;
    n_fed_      = 0;
    has_prompt_ = false;
}

} // namespace draftwood
