// Functions for tests and benchmarks. Contract: draftwood-testing.h.

#include "draftwood-testing.h"

#include "capi/capi.h"
#include "drafters/recent_vocab.h"
#include "llama/kq_mask.h"
#include "llama/testing_masks.h"
#include "tree/build.h"

#include <algorithm>

using namespace draftwood;

namespace {

void require_budget(int32_t budget) {
    if (budget < 1 || budget > max_tree_nodes) {
        fail(DW_ERR_ARGUMENT, "a budget of %d nodes; expected 1 to %d", budget, max_tree_nodes);
    }
}

} // namespace

dw_status dw_next_scheduled(dw_engine * engine, llama_sampler * sampler, bool accept, llama_token * token) {
    return with(engine, "dw_next_scheduled", [&](auto & e) {
        require("dw_next_scheduled", sampler, token);
        *token = e.next_scheduled(sampler, accept);
    });
}

dw_status dw_replay(dw_engine * engine, int32_t n_times, double * microseconds) {
    return with(engine, "dw_replay", [&](auto & e) {
        require("dw_replay", microseconds);
        *microseconds = e.replay(n_times);
    });
}

dw_status dw_limit_memory(dw_engine * engine, int64_t drafter_bytes, int64_t graph_bytes, int64_t tree_bytes) {
    return with(engine, "dw_limit_memory", [&](auto & e) {
        device_budget & budget  = e.budget();
        budget.drafter.limit    = drafter_bytes;
        budget.graphs.limit     = graph_bytes;
        budget.tree_state.limit = tree_bytes;
    });
}

dw_status dw_kq_masks(dw_engine * engine, int32_t n_rows, int32_t n_streams, int32_t n_pos, bool causal, bool f16,
                      const int32_t * seq_ids, const int32_t * positions, int32_t n_kv, float * masks, float * ours,
                      bool * is_filled) {
    return with(engine, "dw_kq_masks", [&](auto & e) {
        require("dw_kq_masks", seq_ids, positions, masks, ours, is_filled);
        const mask_rows of = { n_rows, n_streams, n_pos, causal, f16, seq_ids, positions, n_kv };
        *is_filled         = compare_kq_masks(e.sequence().context().get(), of, masks, ours);
    });
}

int64_t dw_n_filled_masks() {
    return n_filled_kq_masks();
}

dw_status dw_end_of_cells(dw_engine * engine, bool of_drafter, int32_t * end) {
    return with(engine, "dw_end_of_cells", [&](auto & e) {
        require("dw_end_of_cells", end);
        const attachment * drafter = e.drafter_attached();
        if (of_drafter && !drafter) {
            fail(DW_ERR_ARGUMENT, "found an engine whose drafter has no context; expected MTP or DFlash");
        }
        *end = end_of_cells(of_drafter ? drafter->ctx : e.sequence().context().get());
    });
}

dw_status dw_remove_from(dw_engine * engine, int32_t seq_id, int32_t position) {
    return with(engine, "dw_remove_from",
                [&](auto & e) { remove_from_cache(e.sequence().context().get(), seq_id, position); });
}

dw_status dw_fuse(dw_engine * engine, int32_t where) {
    return with(engine, "dw_fuse", [&](auto & e) {
        static_assert((int32_t) fuse_where::everywhere == DW_FUSE_EVERYWHERE, "the same order");
        if (where < DW_FUSE_NOWHERE || where > DW_FUSE_EVERYWHERE) {
            fail(DW_ERR_ARGUMENT, "found where = %d; expected 0 to 2", where);
        }
        e.sequence().context().attached().fuse((fuse_where) where);
        if (attachment * drafter = e.drafter_attached()) {
            drafter->fuse((fuse_where) where);
        }
    });
}

dw_status dw_fused(dw_engine * engine, bool of_drafter, int32_t * n) {
    return with(engine, "dw_fused", [&](auto & e) {
        require("dw_fused", n);
        const attachment * whose = of_drafter ? e.drafter_attached() : &e.sequence().context().attached();
        if (!whose) {
            fail(DW_ERR_UNSUPPORTED, "the engine's drafter has no context");
        }
        std::copy(whose->n_fused.begin(), whose->n_fused.end(), n);
    });
}

struct dw_accepted_log : accepted_observer {
    explicit dw_accepted_log(std::shared_ptr<model_attachment> of) :
        model(std::move(of)) {
        model->add(*this);
    }
    ~dw_accepted_log() override { model->remove(*this); }

    void on_accepted(const accepted_rows & rows) noexcept override {
        try {
            for (int32_t i = 0; i < rows.n; ++i) {
                entries.push_back({ rows.seq, rows.tokens[i], rows.pos + i });
            }
        } catch (const std::exception &) {
            is_whole = false;
        }
    }

    struct entry {
        llama_seq_id seq;
        llama_token  token;
        llama_pos    pos;
    };
    std::shared_ptr<model_attachment> model;
    std::vector<entry>                entries;
    bool                              is_whole = true;
};

dw_status dw_accepted_log_new(dw_engine * engine, dw_accepted_log ** log) {
    return with(engine, "dw_accepted_log_new", [&](auto & e) {
        require("dw_accepted_log_new", log);
        *log = new dw_accepted_log(e.sequence().context().attached().model);
    });
}

void dw_accepted_log_free(dw_accepted_log * log) {
    delete log;
}

dw_status dw_accepted_log_get(const dw_accepted_log * log, int32_t * seq_ids, llama_token * tokens, int32_t * positions,
                              int32_t * n) {
    return guard([&] {
        require("dw_accepted_log_get", log, seq_ids, tokens, positions, n);
        if (!log->is_whole) {
            fail(DW_ERR_MEMORY, "no memory for all accepted tokens");
        }
        const int32_t n_all = (int32_t) log->entries.size();
        for (int32_t i = 0; i < std::min(*n, n_all); ++i) {
            seq_ids[i]   = log->entries[i].seq;
            tokens[i]    = log->entries[i].token;
            positions[i] = log->entries[i].pos;
        }
        *n = n_all;
        return DW_OK;
    });
}

dw_status dw_tree_from_positions(int32_t root, const int32_t * tokens, const float * log_probs, int32_t n_positions,
                                 int32_t n_each, int32_t budget, int32_t spine, float off_spine, dw_tree * tree) {
    return guard([&] {
        require("dw_tree_from_positions", tokens, log_probs, tree);
        require_budget(budget);
        if (n_positions < 0 || n_each < 0) {
            fail(DW_ERR_ARGUMENT, "%d positions of %d candidates; expected 0 or more", n_positions, n_each);
        }
        std::vector<std::vector<candidate>> positions(n_positions);
        for (int32_t d = 0; d < n_positions; ++d) {
            for (int32_t i = 0; i < n_each; ++i) {
                positions[d].push_back({ tokens[d * n_each + i], log_probs[d * n_each + i] });
            }
        }
        to_native(tree_from_positions(root, positions, budget, spine, off_spine), *tree);
        return DW_OK;
    });
}

dw_status dw_tree_merge(dw_tree * tree, const dw_tree * other) {
    return guard([&] {
        require("dw_tree_merge", tree, other);
        token_tree       merged = from_native(*tree, /*by_depth*/ false);
        const token_tree added  = from_native(*other, /*by_depth*/ false);
        if (merged.tokens[0] != added.tokens[0]) {
            fail(DW_ERR_ARGUMENT, "trees with the roots %d and %d; expected one root", merged.tokens[0],
                 added.tokens[0]);
        }
        merge(merged, added);
        if (merged.size() > max_tree_nodes) {
            fail(DW_ERR_ARGUMENT, "%d nodes in both trees; expected up to %d", merged.size(), max_tree_nodes);
        }
        to_native(merged, *tree);
        return DW_OK;
    });
}

dw_status dw_tree_select(const dw_tree * tree, int32_t budget, int32_t spine, dw_tree * selected) {
    return guard([&] {
        require("dw_tree_select", tree, selected);
        require_budget(budget);
        to_native(select(from_native(*tree, /*by_depth*/ false), budget, spine), *selected);
        return DW_OK;
    });
}

int32_t dw_tree_bucket(int32_t n_nodes) {
    return bucket(n_nodes);
}

dw_status dw_recent_vocab(int32_t size, int32_t n_vocab, const llama_token * tokens, int32_t n, int32_t * places,
                          llama_token * held) {
    return guard([&]() -> dw_status {
        require("dw_recent_vocab", tokens, places, held);
        if (size < 1 || size > n_vocab) {
            fail(DW_ERR_ARGUMENT, "a part of %d tokens; expected 1 to n_vocab, which is %d", size, n_vocab);
        }
        recent_vocab vocab(size, n_vocab);
        for (int32_t i = 0; i < n; ++i) {
            if (tokens[i] < 0 || tokens[i] >= n_vocab) {
                fail(DW_ERR_ARGUMENT, "tokens[%d] is %d; expected 0 to %d", i, tokens[i], n_vocab - 1);
            }
            places[i] = vocab.use(tokens[i]);
        }
        for (int32_t place = 0; place < size; ++place) {
            held[place] = vocab.token(place);
        }
        return DW_OK;
    });
}
