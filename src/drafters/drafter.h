// What the round asks of a drafter. A drafter never decides about text: wrong drafts cost time only.
// Test: tests/model/engine/test_rounds.py, test_trim.py, test_kept_by_others.py (memory()),
// tests/model/test_checkpoints.py (mark()).

#pragma once

#include "draftwood.h"
#include "tree/token_tree.h"

#include <memory>
#include <vector>

struct dw_attachment;
struct llama_context;

namespace draftwood {

struct decode_request;
class target_context;

// What a draft may be.
struct draft_request {
    llama_token last;   // the newest token, which the target has not seen
    llama_pos   pos;    // its position
    int32_t     depth;  // longest path, tokens
    int32_t     budget; // most nodes of the tree, root included; 0: a chain
    int32_t     spine; // first nodes of the greedy path, kept even if others have a higher probability; width is 1 then
    int32_t     width; // most paths that a drafter goes on from at one depth, where each costs it a row
    float       p_min; // a path ends where its probability falls under this
    float       temperature; // that the request samples at; 0: greedy
    bool        ahead;       // a chain whose tokens need not be known before they are verified
};

// What became of a request for a draft.
enum class draft_result {
    drafted, // the tree holds what was found, which may be nothing
    begun,   // the same, and it had begun before the request (begin_behind)
    cold,    // the drafter lacks what it needs here, such as the target's hidden state at pos - 1
    failed,  // its own decode failed and left no draft
};

// Rows of the target's last decode that are kept: tokens i32[n] at positions pos.., computed in rows i32[n].
struct kept_rows {
    const llama_token * tokens;
    const int32_t *     rows;
    int32_t             n;
    llama_pos           pos;
    bool                is_prompt;         // or a part of one; else a round accepted them
    bool                scheduled = false; // for benchmarks: take each token for its row's best
};

class drafter;

// One of several drafts that are made together: who makes it of which sequence, and what became of it.
struct joint_draft {
    drafter *     who;
    llama_seq_id  seq;
    draft_request request; // a chain, and not ahead
    token_tree *  tree;    // holds the root
    draft_result  result;
    size_t        index; // of who asked
};

// Order of calls. observe() comes after each part of a prompt and after each commit, in the order of the text; draft()
// comes at the end of the text, between two of them, not at all or several times. If the text was cut, goes on behind a
// gap, or a draft was dropped, trim() comes before the next of these; after reset() they may begin anywhere in a text.
class drafter {
  public:
    virtual ~drafter() = default;

    virtual void observe(const kept_rows & kept) = 0;

    // Add to `tree`, which holds the root, what may follow it, with the probabilities of its paths where it is no
    // chain. Throws failure if the drafter cannot go on from what it holds: the caller resets it.
    virtual draft_result draft(const draft_request & request, token_tree & tree) = 0;

    // Drafters that return the same value can draft together, by draft_all() of any of them. nullptr: this one cannot.
    virtual const void * joint() const { return nullptr; }
    // draft() for each, in the order of their sequences, which all differ. A drafter that fails is reset, or holds
    // what it held before. Throws failure; all of them must be reset then.
    virtual void draft_all(std::vector<joint_draft> &) {}

    // Whether drafts can be made `ahead`. settle() fills in the tokens of such a tree. Until then feed_verify() lets a
    // verify of its n drafts take them from the drafter's device.
    virtual bool can_draft_ahead() const { return false; }
    virtual void settle(token_tree &) {}
    virtual void feed_verify(decode_request &, int32_t) {}
    // A verify of such a draft, n rows from `pos` on, is queued, and nobody knows what is kept of it. The next draft
    // may begin behind it: observe() says where the text went on. Returns whether that is a guess about tokens, which
    // is only right for greedy requests that take each row's best. Throws failure.
    virtual bool begin_behind(llama_pos, int32_t, bool /*greedy*/) { return false; }
    // how many tokens of a draft that is begun are there
    virtual int32_t n_begun() const { return 0; }

    // whether its graphs take turns in one place since one found no memory (graph_store.h)
    virtual bool short_of_memory() const { return false; }

    // of its own context; nullptr: it has none
    virtual dw_attachment * attached() { return nullptr; }

    // tokens that it chooses among; 0: the whole vocabulary
    virtual int32_t draft_vocab() const { return 0; }

    // The sequence has n_keep positions: it was cut, or leaves a gap behind what was observed.
    virtual void trim(llama_pos n_keep) = 0;

    // Drafts may still go by what was observed before: tokens that texts used are more likely to be drafted.
    virtual void reset() = 0;

    // Where it keeps its part of the sequence, all that was observed included; nullptr: nowhere. Others may save that
    // part, put it back after reset(), and copy it to a sequence whose drafter was reset. Throws failure.
    virtual llama_context * memory() { return nullptr; }

    // What the drafter knows at position `pos`, the end of what was observed, beside what trim() leaves; and back to
    // it, after a trim to `pos`. Most know nothing more.
    virtual std::vector<float> mark(llama_pos) const { return {}; }
    virtual void               resume(llama_pos, const std::vector<float> &) {}
};

// A failed draft leaves the root alone, and a drafter that begins anew.
void drop_failed(drafter & who, token_tree & tree);

// The drafter that `params` names, for `target`, which was made with `context_params`; nullptr for DW_DRAFTER_NONE.
// Throws failure where the model has none, or the file does not fit.
std::unique_ptr<drafter> make_drafter(target_context & target, const llama_context_params & context_params,
                                      const dw_params & params);

} // namespace draftwood
