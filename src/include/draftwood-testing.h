// Functions of the C API that only tests and benchmarks call. The library exports them; the wheel has no copy of this
// header. Conventions, handles and structs: draftwood.h. DW_API_VERSION counts changes here too.
// Python signatures: bench/testing_api.py. Both are compared by tests/unit/test_capi.py.

#pragma once

#include "draftwood-experts.h"

#ifdef __cplusplus
extern "C" {
#endif

// Values of `source` below: who drafts.
typedef enum dw_draft_source {
    DW_SOURCE_DRAFTER = 0, // the drafter of dw_params
    DW_SOURCE_NGRAM   = 1, // n-grams beside it
} dw_draft_source;

// --- rounds; tests: tests/model/engine/test_results.py, test_arguments.py

// Sample as dw_next does, at the same cost. Then go on to the most probable child (accept), or end the walk. The text
// means nothing.
DW_API dw_status dw_next_scheduled(dw_engine * engine, struct llama_sampler * sampler, bool accept,
                                   llama_token * token);

// Run the graph of the open round's verify n_times again. Returns microseconds of one run on its device.
// Errors: DW_ERR_STATE without an open round of two rows or more, or if a verify writes the state (dw_tree_refusal);
// DW_ERR_UNSUPPORTED on a CPU.
DW_API dw_status dw_replay(dw_engine * engine, int32_t n_times, double * microseconds);

// --- memory: src/llama/device_budget.h; test: tests/model/engine/test_budget.py

// Bytes that drafters, kept graphs and state factors may hold from now on, for all engines of this llama_model.
DW_API dw_status dw_limit_memory(dw_engine * engine, int64_t drafter_bytes, int64_t graph_bytes, int64_t tree_bytes);

// The same of the experts in host memory that are loaded into a pool from now on.
DW_API dw_status dw_expert_limit_host(dw_expert_pool * pool, int64_t n_bytes);

// --- accepted tokens: src/llama/model_attachment.h; test: tests/model/engine/test_accepted.py

typedef struct dw_accepted_log dw_accepted_log;

// Observes the rounds that engines of this llama_model commit, until it is freed by the caller.
DW_API dw_status dw_accepted_log_new(dw_engine * engine, dw_accepted_log ** log);
DW_API void      dw_accepted_log_free(dw_accepted_log * log);
// Accepted tokens so far, each i32[n]: sequence, token, position. n: in, the room; out, how many there are.
DW_API dw_status dw_accepted_log_get(const dw_accepted_log * log, int32_t * seq_ids, llama_token * tokens,
                                     int32_t * positions, int32_t * n);

// --- layers made of a few ops: src/decode/fused_layers.h; test: tests/model/test_fused_layers.py

typedef enum dw_fuse_where {
    DW_FUSE_NOWHERE    = 0,
    DW_FUSE_ON_GPU     = 1,
    DW_FUSE_EVERYWHERE = 2, // on CPUs, too, where the ops are slow references
} dw_fuse_where;

// Where the engine's target and its drafter run them from the next graph on.
DW_API dw_status dw_fuse(dw_engine * engine, int32_t where);
// How many of each kind of part the newest graph has, the target's or its drafter's, i32[19] as fused_part numbers
// them.
DW_API dw_status dw_fused(dw_engine * engine, bool of_drafter, int32_t * n);

// --- the target's KV cache: src/llama/kq_mask.h, memory.h; test: tests/model/test_kq_mask.py
// Errors: DW_ERR_UNSUPPORTED if the target has another memory than one KV cache, with or without recurrent states;
// DW_ERR_ARGUMENT for sequences, rows or cells that it does not have.

// The mask that llama.cpp fills for rows, looking at each cell, and ours, which is 7 unless is_filled; each
// f32[n_rows][n_kv], of the caller, as f16 or f32 holds them. seq_ids i32[n_rows], positions i32[n_pos][n_rows]; each
// of n_streams has n_rows / n_streams rows. Which masks are ours to fill, set_input_kq_mask decides, and is not asked.
DW_API dw_status dw_kq_masks(dw_engine * engine, int32_t n_rows, int32_t n_streams, int32_t n_pos, bool causal,
                             bool f16, const int32_t * seq_ids, const int32_t * positions, int32_t n_kv, float * masks,
                             float * ours, bool * is_filled);
// How many masks were filled by positions so far, in this process.
DW_API int64_t dw_n_filled_masks(void);
// The number of the last cell in use, plus one, of the engine's KV cache or its drafter's. Errors: DW_ERR_ARGUMENT
// without a drafter that has a context.
DW_API dw_status dw_end_of_cells(dw_engine * engine, bool of_drafter, int32_t * end);
// Remove a sequence's cells from a position on, as rejected drafts are.
DW_API dw_status dw_remove_from(dw_engine * engine, int32_t seq_id, int32_t position);

// --- trees: src/tree/build.h; test: tests/unit/test_tree.py

// positions: tokens and log-probabilities [n_positions][n_each], best first.
DW_API dw_status dw_tree_from_positions(int32_t root, const int32_t * tokens, const float * log_probs,
                                        int32_t n_positions, int32_t n_each, int32_t budget, int32_t spine,
                                        float off_spine, dw_tree * tree);
DW_API dw_status dw_tree_merge(dw_tree * tree, const dw_tree * other);
DW_API dw_status dw_tree_select(const dw_tree * tree, int32_t budget, int32_t spine, dw_tree * selected);
DW_API int32_t   dw_tree_bucket(int32_t n_nodes);

// --- the cost model of DW_LENGTH_AUTO: src/round/cost_model.h
// Tests: tests/unit/test_cost_model.py, test_cost_curve.py, test_draft_aftermath.py. Times are microseconds. Sizes are
// tokens drafted or rows verified. Errors: DW_ERR_ARGUMENT for a value out of range.

typedef struct dw_cost_model dw_cost_model;

// The caller frees the model. n_warmup: times of a size that are discarded. shares_cores: false on a GPU.
// copies_experts: not all of them are on the card.
DW_API dw_status dw_cost_model_new(int32_t n_warmup, bool shares_cores, bool copies_experts, dw_cost_model ** model);
DW_API void      dw_cost_model_free(dw_cost_model * model);

DW_API dw_status dw_cost_model_set_curve(dw_cost_model * model, const dw_curve * curve);
DW_API dw_status dw_cost_model_get_curve(const dw_cost_model * model, dw_curve * curve); // without new times
DW_API dw_status dw_cost_model_update(dw_cost_model * model, bool at_load);              // take new times into it

DW_API dw_status dw_cost_model_add_draft_time(dw_cost_model * model, int32_t n_tokens, int64_t us);
DW_API dw_status dw_cost_model_add_verify_time(dw_cost_model * model, int32_t n_rows, int64_t us);
DW_API dw_status dw_cost_model_add_acceptance(dw_cost_model * model, int32_t source, int32_t n_judged,
                                              int32_t n_accepted);
// What a session adds: a draft; a round that accepted n_tokens (0 microseconds: its time is not known); a prompt.
DW_API dw_status dw_cost_model_add_draft(dw_cost_model * model, int32_t n_tokens, int64_t us);
DW_API dw_status dw_cost_model_add_round(dw_cost_model * model, bool drafted, int32_t n_rows, int32_t n_tokens,
                                         int64_t us);
DW_API dw_status dw_cost_model_add_prompt(dw_cost_model * model, int32_t n_tokens);
// microseconds that a draft costs the round behind it
DW_API dw_status dw_cost_model_cost_behind_draft(const dw_cost_model * model, double * microseconds);
// microseconds that the next draft takes longer than one behind a draft
DW_API dw_status dw_cost_model_cost_of_return(const dw_cost_model * model, double * microseconds);
// probabilities f64[n]
DW_API dw_status dw_cost_model_add_branches(dw_cost_model * model, const double * probabilities, int32_t n,
                                            int32_t n_accepted);

DW_API dw_status dw_cost_model_is_outdated(const dw_cost_model * model, bool * is_outdated);
// The choice for a round in which the sources could draft up to so many tokens; n_tokens 0: a plain step. Counts the
// round for pauses and trials.
DW_API dw_status dw_cost_model_choose(dw_cost_model * model, int32_t longest_drafter, int32_t longest_ngram,
                                      int32_t * source, int32_t * n_tokens);
// whether the next choice will be a plain step, if nothing changes
DW_API dw_status dw_cost_model_plain_step_comes(const dw_cost_model * model, bool * comes);
DW_API dw_status dw_cost_model_pays_to_branch(const dw_cost_model * model, int32_t source, int32_t n_tokens,
                                              bool * pays);
// Nodes of the tree around a chosen path of n_tokens, from the probabilities f64[n] of its branches, best first.
DW_API dw_status dw_cost_model_tree_size(const dw_cost_model * model, int32_t source, int32_t n_tokens,
                                         const double * probabilities, int32_t n, int32_t * n_nodes);
// Expected microseconds and tokens of a round with a draft of n_tokens; 0 microseconds: not known.
DW_API dw_status dw_cost_model_expect(const dw_cost_model * model, int32_t source, int32_t n_tokens,
                                      double * microseconds, double * tokens);

// --- lengths of drafts in a batch: src/round/batch_model.h; test: tests/unit/test_batch_model.py

typedef struct dw_batch_model dw_batch_model;

// The caller frees the model. n_warmup, shares_cores: as of dw_cost_model_new.
DW_API dw_status dw_batch_model_new(int32_t n_warmup, bool shares_cores, dw_batch_model ** model);
DW_API void      dw_batch_model_free(dw_batch_model * model);
// A graph verified n_rows of each of so many sequences; drafts of up to n_tokens were made together.
DW_API dw_status dw_batch_model_add_verify(dw_batch_model * model, int32_t n_sequences, int32_t n_rows, int64_t us);
DW_API dw_status dw_batch_model_add_draft(dw_batch_model * model, int32_t n_sequences, int32_t n_tokens, int64_t us);
// The choice for a round of n sequences in one graph, where each draft token of sequence i is accepted with a
// probability of acceptance[i], f64[n]; longest, n_tokens: i32[n]. solo: times of a sequence alone.
DW_API dw_status dw_batch_model_choose(dw_batch_model * model, const dw_cost_model * solo, const double * acceptance,
                                       const int32_t * longest, int32_t n, int32_t * n_tokens);

// Rounds that dw_engine_new runs to measure the curve, i32[DW_CURVE_SIZE] by tokens drafted. The first n_slow rounds of
// a size take slow_us, later ones fast_us; the first n_busy of all take busy times as long. src/round/load_schedule.h
DW_API dw_status dw_load_rounds(int32_t longest_draft, int32_t n_warmup, int32_t n_slow, int64_t slow_us,
                                int64_t fast_us, int32_t n_busy, int32_t busy, int32_t * rounds);

// --- the tokens that drafts are chosen from: src/drafters/recent_vocab.h; test: tests/unit/test_recent_vocab.py

// A part of `size` of n_vocab tokens, 1 <= size <= n_vocab, is made and sees n tokens of 0..n_vocab-1. Of each it gives
// the place that the token was given, -1: it has one. held: llama_token[size], in the end.
DW_API dw_status dw_recent_vocab(int32_t size, int32_t n_vocab, const llama_token * tokens, int32_t n, int32_t * places,
                                 llama_token * held);

// --- threads of a verify: src/llama/thread_choice.h; test: tests/unit/test_thread_choice.py

typedef struct dw_thread_choice dw_thread_choice;

DW_API dw_status dw_thread_choice_new(dw_thread_choice ** choice); // the caller frees it
DW_API void      dw_thread_choice_free(dw_thread_choice * choice);
// A verify of n_rows rows, 1 to DW_MAX_TREE, took us[0] microseconds if it ran on n_threads_batch, us[1] on n_threads.
// on_n_threads: where it ran; is_trial: on the count that is not chosen.
DW_API dw_status dw_thread_choice_verify(dw_thread_choice * choice, int32_t n_rows, const int64_t * us,
                                         bool * on_n_threads, bool * is_trial);

#ifdef __cplusplus
}
#endif
