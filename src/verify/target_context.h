// What the engines of one llama_context share, one engine a sequence: hook state, graphs, the batch, the tree state.
// The one owner of what is attached to that context. Must not know: drafters, samplers, rounds.
// Test: tests/model/engine/test_others.py, test_shared_context.py, test_sequences.py, test_little_memory.py.

#pragma once

#include "llama/attachment.h"
#include "llama/batch.h"
#include "llama/facts.h"
#include "llama/memory_fork.h"
#include "llama/memory_marks.h"
#include "llama/results.h"
#include "llama/thread_choice.h"
#include "verify/tree_state.h"

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace draftwood {

// What an engine hears of others who use its sequence's context.
class sequence_listener {
  public:
    virtual ~sequence_listener() = default;

    // Only accepted rows may be in the memory from now on, and their logits go. `decodes`: somebody else is about to
    // decode into this sequence.
    virtual void on_flush(bool decodes) noexcept = 0;

    // the sequence's memory was replaced from outside (a state was loaded)
    virtual void on_replaced() noexcept = 0;
};

// Sequences that a verify decodes in one graph, as many rows each.
struct verify_group {
    std::vector<planned_tree> members;
    int32_t                   n_rows;
    bool                      on_trees; // a tree state commits paths; else each member has a chain, or one row

    int32_t n_all_rows() const { return n_rows * (int32_t) members.size(); }
};

class target_context : public std::enable_shared_from_this<target_context>, public context_listener {
  public:
    // the one of `target`, made for the first engine on it; throws failure where that has other exact_rows.
    // `always_top`: see results.h
    static std::shared_ptr<target_context> of(llama_context * target, int32_t exact_rows, bool always_top);
    // the one of `target`; nullptr: no engine is on it
    static target_context * find(const llama_context * target) noexcept;
    ~target_context() override;
    target_context(const target_context &)             = delete;
    target_context & operator=(const target_context &) = delete;

    // one listener a sequence; throws failure where that has one already
    void add(llama_seq_id seq, sequence_listener & listener);
    void remove(const sequence_listener & listener) noexcept;

    llama_context * get() const { return target_; }
    bool            at_work() const { return at_work_; } // an engine decodes, saves or restores: no news to listeners
    int64_t         n_exact_batches() const { return attached_.n_exact_batches; }
    int64_t         n_fused_parts() const { return attached_.n_fused_parts(); }

    row_batch &  batch() { return batch_; }            // of the next decode; the caller clears it
    results &    newest_results() { return results_; } // by the newest decode
    attachment & attached() { return attached_; }
    // llama_decode of the batch, rows of these sequences, as `request` says. Open rounds of others are settled first,
    // since what they wait for goes. Then `begin` is called, once an attempt. Throws failure.
    void decode(const std::vector<place> & places, int32_t n_rows, const decode_request & request,
                const std::function<void()> & begin);
    // whether the memory is as it was before the newest decode, if that failed
    bool intact() const { return intact_; }
    // a verify begins: failures of earlier decodes no longer count
    void forget_failure() { intact_ = true; }

    // For benchmarks: microseconds that the newest decode's graph takes when it is run again and again.
    double replay(int32_t n_times);

    bool is_empty(llama_seq_id but = -1) const; // no sequence other than `but` holds a position

    // free cells of the sequence's KV cache; INT32_MAX if the context has no llama_kv_cache
    int32_t free_cells(llama_seq_id seq) const;

    // whether graphs take turns in the memory that llama.cpp set aside (graph_store.h)
    bool short_of_memory() const;
    // rows that a verify may have in all, after a larger one found no memory for its graph; INT32_MAX: none failed
    int32_t row_limit() const { return row_limit_; }
    // The same for each of n_sequences that are verified together, at least 1. Once a part of a layer was fused, all
    // rows are to fit into one graph of fused layers: a larger one has llama.cpp's kernels, which are slower and round
    // otherwise than a plain step's. So from 9 sequences on none drafts there.
    int32_t row_limit(int32_t n_sequences) const;
    // A verify of n_rows rows in all found none. The limit is the next smaller bucket, at least 1.
    void limit_rows(int32_t n_rows);

    // One decode of these groups, one after another; no row is kept until commits say so. Several groups: those on
    // trees come first, the i-th of them in trees(i), and each has a graph of its own. `request` may hold feeds.
    void verify(const std::vector<verify_group> & groups, decode_request request);

    // --- A plain step of a greedy text that is queued before its token is known: that goes from the best of the row
    // before straight into the step's input. There is one at a time, of hybrid models that are on one device. It is
    // dropped by whoever decodes otherwise, saves or loads, be it another sequence (memory_fork.h).
    bool can_queue_step(llama_seq_id seq) const;
    // Behind the newest decode, of one row of `at.seq` before `at`. The results stay that decode's until take_step().
    // n_dropped counts it if it is never taken, and must live as long. Where it is not queued, or fails, memory and
    // results are as before; throws failure if the memory is unknown then.
    void queue_step(const place & at, int64_t & n_dropped);
    bool has_step() const { return step_.has_value(); }
    // whether the last position of `seq` is the step's
    bool is_step(llama_seq_id seq, llama_pos last) const {
        return step_ && step_->at.seq == seq && step_->at.pos == last;
    }
    // The step is the newest decode now, if its token was this one and nobody changed what graphs compute; else false.
    bool take_step(llama_seq_id seq, llama_token token);
    // For those of the newest decode, and not for the step behind it. Returns microseconds: since the rows before them
    // were there, if that is what the decode took. 0: it was done before somebody waited, or other decodes lay between.
    int64_t wait_for_rows();
    void    drop_step() noexcept;

    // That verify took so many microseconds, until its results were there. Returns false if it was a trial of the
    // thread count that is not chosen.
    bool took(int64_t us);
    // whether it ran on n_threads, as plain steps do
    bool on_step_threads() const { return verified_on_ == n_threads; }

    // Makes a tree state with room for so many rows, unless there is one. tree_refusal() says why there can be none.
    // Throws failure with DW_ERR_MEMORY; a smaller one stays.
    void prepare_trees(int32_t n_rows, size_t i = 0);
    // The same for a verify that can do with less: false if there is no such room. A size that found no memory is not
    // tried again until engines of the context come or go. Where there was no room yet, open rounds are settled.
    bool grow_trees(int32_t n_rows, size_t i);
    // of the i-th group of a verify
    tree_state * trees(size_t i = 0) const { return i < trees_.size() ? trees_[i].get() : nullptr; }
    std::string  tree_refusal() const { return trees_.empty() ? refusal_ : ""; }
    void         finish_trees() const;

    // What these engines share, such as a drafter's context or learned times. The first who asks makes it, and it goes
    // with the last who holds it. name: of what it is, and of the parameters that it depends on; each stands for one T.
    template <typename T, typename F> std::shared_ptr<T> shared(const std::string & name, F make) {
        std::weak_ptr<void> & held  = shared_[name];
        std::shared_ptr<T>    found = std::static_pointer_cast<T>(held.lock());
        if (!found) {
            found = make();
            held  = found;
        }
        return found;
    }

    // runs what saves or restores a state, without telling the listeners
    template <typename F> auto working(F f) {
        const scope work(at_work_);
        return f();
    }

  private:
    struct member {
        llama_seq_id        seq;
        sequence_listener * listener;
    };
    struct queued_step {
        place       at;
        memory_fork fork;
        graph_flags flags;
        int64_t *   n_dropped;
    };
    struct state_place {
        llama_seq_id seq;
        int32_t      cell;
    };
    // true while it lives
    struct scope {
        explicit scope(bool & flag) :
            flag_(flag) {
            flag_ = true;
        }
        ~scope() { flag_ = false; }
        bool & flag_;
    };

    target_context(llama_context * target, int32_t exact_rows, bool always_top);
    static bool                is_on_one_device(const llama_context * ctx);
    template <typename F> void each_listener(F f);
    void                       forget_verifies();
    void                       on_decode(const sequence_set & into) noexcept override;
    void                       on_save(const sequence_set & of) noexcept override;
    void                       on_replace(const sequence_set & of) noexcept override;
    std::vector<place>         add_rows(const std::vector<verify_group> & groups);
    bool                       leaves_states_alone(const decode_request & request) const;
    int32_t run_batch(const decode_request & request, const std::function<void()> & begin, std::string & why);
    void    run_step(const memory_marks & marks, const decode_request & request);
    void    drop_place_of_steps();
    void    bring_state_back();
    void    get_rows();
    bool    chooses_threads(int32_t n_rows) const;
    int32_t attempt(const memory_marks & marks, const decode_request & request, const std::function<void()> & begin,
                    std::string & why);
    void    require_decoded(int32_t rc, llama_pos pos, int32_t n_rows, const std::string & why) const;
    void    settle_all_but(const std::vector<place> & places);

    llama_context *                            target_;
    bool                                       at_work_ = false;
    bool                                       intact_  = true;
    std::vector<member>                        members_;
    std::map<std::string, std::weak_ptr<void>> shared_;
    int32_t                    slot_ = 0; // decode_request::slot of what was decoded last, a queued step included
    std::optional<queued_step> step_;
    bool                       steps_fail_ = false; // one did, and was not aborted: none is queued any more
    std::optional<state_place> left_;               // by the first of the steps since the last decode of another kind
    int64_t                    rows_came_us_ = 0;   // those of the newest decode; 0: nobody waited for them
    attachment                 attached_;
    row_batch                  batch_;
    results                    results_;
    bool                       is_on_one_device_;    // all that a step reads and writes
    std::vector<std::unique_ptr<tree_state>> trees_; // none: rejected drafts are rolled back by seq_rm
    std::string                              refusal_ = "nothing is drafted";
    bool          refused_   = false;     // for good: it depends on the model and the context alone
    int32_t       no_memory_ = INT32_MAX; // rows that a larger tree state found no memory for
    int32_t       row_limit_ = INT32_MAX;
    thread_choice threads_;
    bool          is_timed_    = false;           // the newest verify is for threads_ to learn from
    thread_count  verified_on_ = n_threads_batch; // the newest one
};

} // namespace draftwood
