// MTP drafting: see mtp.h.

#include "mtp.h"

#include "llama-ext.h"

#include <algorithm>
#include <cmath>

namespace draftwood {

namespace {

constexpr int32_t n_single_max = 12; // pairs that are cheaper one by one than in a batch

constexpr int32_t widest = 8; // rows of a level of a tree

// whether a node with this path may be among the `budget` most probable
bool may_enter(const token_tree & tree, float path, int32_t budget) {
    const auto better = [path](float other) { return other > path; };
    return std::count_if(tree.log_probs.begin(), tree.log_probs.end(), better) < budget;
}

llama_context * make_context(llama_context * target, llama_context_params params) {
    params               = drafter_context::params_for(target, params);
    params.ctx_type      = LLAMA_CONTEXT_TYPE_MTP;
    params.n_outputs_max = widest;

    llama_context * ctx = llama_init_from_model(const_cast<llama_model *>(llama_get_model(target)), params);
    if (!ctx) {
        fail(DW_ERR_MEMORY, "no context for the MTP block could be made for n_ctx = %u: is there enough memory?",
             params.n_ctx);
    }
    return ctx;
}

} // namespace

mtp_drafter::mtp_drafter(llama_context * target, llama_context_params params, int32_t exact_rows) :
    target_(target),
    ctx_(make_context(target, params), exact_rows),
    n_embd_(llama_model_n_embd_out(llama_get_model(target))),
    n_rows_max_((int32_t) llama_n_ubatch(ctx_.get())) {
    hidden_.resize(n_embd_);
    tap_hidden(target, true);
    llama_set_embeddings_nextn(ctx_.get(), true, /*masked*/ true);
}

mtp_drafter::~mtp_drafter() {
    tap_hidden(target_, false);
}

int32_t mtp_drafter::draws() const {
    return widest;
}

void mtp_drafter::push(llama_token token, llama_pos pos, const float * hidden) {
    if (pos != queue_.pos + (llama_pos) queue_.tokens.size()) { // after a gap: the queue is one run of positions
        catch_up();
        queue_.pos = pos;
    }
    queue_.tokens.push_back(token);
    queue_.hidden.insert(queue_.hidden.end(), hidden, hidden + n_embd_);
}

void mtp_drafter::observe(const kept_rows & kept) {
    const float * hidden = llama_get_embeddings_nextn(target_); // f32[rows][n_embd] of the last decode
    const auto    row    = [&](int32_t i) { return hidden + (size_t) kept.rows[i] * n_embd_; };
    if (!beams_.empty()) {
        n_fed_ += beams_.keep(ctx_.cache(), kept.tokens + 1, kept.n - 1);
        beams_.clear();
    }
    drop_cells_from(kept.pos + kept.n); // pairs of rejected drafts; those of accepted ones stay as they were drafted
    for (int32_t i = 0; i < kept.n; ++i) {
        const llama_pos p = kept.pos + i;
        // the hidden state before this token; where it is unknown (position 0, a gap) the pair is skipped
        const float * before = i > 0 ? row(i - 1) : hidden_pos_ == p - 1 ? hidden_.data() : nullptr;
        if (p >= n_fed_ && before && p > 0) {
            push(kept.tokens[i], p, before);
        }
    }
    std::copy_n(row(kept.n - 1), n_embd_, hidden_.begin());
    hidden_pos_ = kept.pos + kept.n - 1;

    // a prompt is fed at once; what a round accepted waits and rides along with the next draft
    while ((int32_t) queue_.tokens.size() > std::min(n_rows_max_, DW_MAX_DRAFT + 1)) {
        feed(std::min((int32_t) queue_.tokens.size(), n_rows_max_), /*output*/ false);
    }
}

// Decode the first n queued pairs, with output only for a single one: a masked context copies the first rows of
// its hidden states, not those asked for (llama-context.cpp, decode), so a batch would hand back a wrong one.
void mtp_drafter::feed(int32_t n, bool output) {
    ctx_.batch().clear();
    for (int32_t i = 0; i < n; ++i) {
        ctx_.batch().add(queue_.tokens[i], queue_.pos + i, output, 0, queue_.hidden.data() + (size_t) i * n_embd_,
                         n_embd_);
    }
    const int32_t rc = ctx_.batch().decode();
    if (rc != 0) {
        fail(DW_ERR_DECODE, "llama_decode returned %d in the MTP block at positions %d..%d", rc, queue_.pos,
             queue_.pos + n - 1);
    }
    queue_.tokens.erase(queue_.tokens.begin(), queue_.tokens.begin() + n);
    queue_.hidden.erase(queue_.hidden.begin(), queue_.hidden.begin() + (size_t) n * n_embd_);
    queue_.pos += n;
    n_fed_ = queue_.pos;
}

// Feed all queued pairs. What a round accepted goes in pair by pair: one shape of graph, and for the few pairs of a
// round about as fast as a batch that builds its own (bench/LOG.md).
void mtp_drafter::catch_up() {
    while (!queue_.tokens.empty()) {
        const int32_t n = (int32_t) queue_.tokens.size();
        if (n <= n_single_max) {
            feed(1, /*output*/ true);
        } else {
            feed(std::min(n - 1, n_rows_max_), /*output*/ false); // the last one is needed with logits
        }
    }
}

bool mtp_drafter::draft(const draft_request & request, token_tree & tree) {
    if (request.pos == 0 || hidden_pos_ != request.pos - 1) {
        return false;
    }
    if (n_fed_ > request.pos || !beams_.empty()) { // this very token was drafted from before, and its round never came
        drop_cells_from(request.pos);
    }
    push(request.last, request.pos, hidden_.data());
    catch_up();
    if (request.budget > 0) {
        draft_tree(request, tree);
    } else {
        draft_chain(request, tree);
    }
    return true;
}

// Of a level's nodes those that are worth a row of the next decode: those that may be among the budget's most probable;
// of a drawn tree those that have children, which was decided before.
std::vector<mtp_drafter::leaf> mtp_drafter::best_leaves(const token_tree & tree, std::vector<leaf> leaves,
                                                        const draft_request & request) const {
    const auto hopeless = [&](const leaf & each) {
        return request.drawn ? request.drawn->children(each.node) == 0
                             : !may_enter(tree, tree.log_probs[each.node], request.budget);
    };
    leaves.erase(std::remove_if(leaves.begin(), leaves.end(), hopeless), leaves.end());
    if (!request.drawn) {
        std::stable_sort(leaves.begin(), leaves.end(), [&](const leaf & a, const leaf & b) {
            return tree.log_probs[a.node] > tree.log_probs[b.node];
        });
    }
    const int32_t free = (int32_t) llama_n_ctx(ctx_.get()) - (request.pos + 1 + beams_.size()); // cells
    const int32_t most = std::min({ request.width, widest, max_tree_nodes - beams_.size(), std::max(0, free) });
    leaves.resize(std::min<size_t>(leaves.size(), most));
    return leaves;
}

void mtp_drafter::draft_chain(const draft_request & request, token_tree & tree) {
    float              path = 1.0f;
    std::vector<float> hidden(n_embd_);
    for (int32_t i = 0; i < request.depth; ++i) {
        const likeliest best = ctx_.best(llama_get_logits_ith(ctx_.get(), -1), path, request.p_min);
        if (best.path < request.p_min) {
            break;
        }
        path = best.path;
        tree.add(i, best.token, std::log(path));
        if (i + 1 == request.depth) {
            break;
        }
        std::copy_n(llama_get_embeddings_nextn_ith(ctx_.get(), -1), n_embd_, hidden.begin());
        ctx_.batch().clear();
        ctx_.batch().add(best.token, request.pos + 1 + i, true, 0, hidden.data(), n_embd_);
        if (ctx_.batch().decode() != 0) {
            break; // the context's end: what is drafted so far stands
        }
    }
    n_fed_ = ctx_.end(); // the drafts' pairs stay: see observe
}

// the children of a node, whose row's logits these are
void mtp_drafter::grow(const draft_request & request, int32_t node, const float * logits, token_tree & tree) const {
    const std::vector<candidate> candidates = ctx_.candidates(logits, request.temperature);
    if (request.drawn) {
        request.drawn->grow(tree, node, candidates);
        return;
    }
    for (const candidate & each : candidates) {
        const float path = tree.log_probs[node] + each.log_prob;
        if (path < std::log(request.p_min) || !may_enter(tree, path, request.budget)) {
            break;
        }
        tree.add(node, each.token, path);
    }
}

// Level by level: the leaves that are worth a row are decoded together, each seeing its ancestors only, and their
// candidates are the next level's nodes.
void mtp_drafter::draft_tree(const draft_request & request, token_tree & tree) {
    std::vector<leaf> level(1, { 0, -1, 0 }); // the root's row is decoded already
    for (int32_t depth = 1; depth <= request.depth; ++depth) {
        std::vector<leaf>  next;
        std::vector<float> hidden; // f32[level.size()][n_embd]
        for (int32_t i = 0; i < (int32_t) level.size(); ++i) {
            const int32_t output = depth == 1 ? -1 : i;
            const float * h      = llama_get_embeddings_nextn_ith(ctx_.get(), output);
            hidden.insert(hidden.end(), h, h + n_embd_);
            const int32_t first = tree.size();
            grow(request, level[i].node, llama_get_logits_ith(ctx_.get(), output), tree);
            for (int32_t child = first; child < tree.size(); ++child) {
                next.push_back({ child, row_of(level, i), i });
            }
        }
        level = best_leaves(tree, std::move(next), request);
        if (level.empty() || depth == request.depth || !decode_level(level, hidden, request, tree)) {
            break;
        }
    }
    n_fed_ = request.pos + 1; // observe() counts those that stay
}

// of the i-th of the level decoded last, in beams_
int32_t mtp_drafter::row_of(const std::vector<leaf> & level, int32_t i) const {
    return level[0].node == 0 ? -1 : beams_.size() - (int32_t) level.size() + i;
}

bool mtp_drafter::decode_level(const std::vector<leaf> & level, const std::vector<float> & hidden,
                               const draft_request & request, const token_tree & tree) {
    ctx_.batch().clear();
    for (const leaf & each : level) {
        beams_.add(each.row, tree.tokens[each.node]);
        ctx_.batch().add(tree.tokens[each.node], request.pos + tree.depths[each.node], true, 0,
                         hidden.data() + (size_t) each.output * n_embd_, n_embd_);
    }
    const int32_t rc = ctx_.decode_with(beams_);
    if (rc != 0) {
        drop_cells_from(request.pos + 1);
    }
    return rc == 0;
}

void mtp_drafter::drop_cells_from(llama_pos pos) {
    if (pos <= n_fed_) {
        beams_.clear(); // all of them, or none is left to settle
    }
    ctx_.remove_from(pos);
    n_fed_ = std::min(n_fed_, pos);
}

void mtp_drafter::trim(llama_pos n_keep) {
    while (!queue_.tokens.empty() && queue_.pos + (llama_pos) queue_.tokens.size() > n_keep) {
        queue_.tokens.pop_back();
        queue_.hidden.resize(queue_.hidden.size() - n_embd_);
    }
    drop_cells_from(n_keep);
    if (hidden_pos_ != n_keep - 1) {
        hidden_pos_ = -1;
    }
}

std::vector<float> mtp_drafter::mark(llama_pos pos) const {
    return hidden_pos_ == pos - 1 ? hidden_ : std::vector<float>{};
}

void mtp_drafter::resume(llama_pos pos, const std::vector<float> & mark) {
    if (!mark.empty()) {
        hidden_     = mark;
        hidden_pos_ = pos - 1;
    }
}

void mtp_drafter::reset() {
    ctx_.clear();
    beams_.clear();
    queue_      = {};
    n_fed_      = 0;
    hidden_pos_ = -1;
}

} // namespace draftwood
