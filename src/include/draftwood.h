// draftwood's public C API: one engine per llama_context, one speculative round at a time.
//
// A round is four calls:
//
//     dw_propose   drafters continue the last token          (drafter's context)
//     dw_verify    last token and drafts in one llama_decode (target's context)
//     dw_next      one emitted token per call, from the request's own sampler chain (or dw_row and dw_took)
//     dw_commit    keep what was emitted, roll the rest back
//
// A draft is a chain or a tree of tokens (dw_tree). dw_next samples the target at each verified position. It goes on to
// the drafted token that equals the sample and stops if there is none. So the text does not depend on the draft, both
// for greedy and for seeded sampling.
//
// Conventions: Calls return a dw_status; dw_last_error() has the text of the last failure. No exception and no abort
// crosses this header. Calls on engines of one llama_model must not overlap, nor with other use of its contexts. Token
// positions count from 0 in the engine's sequence. n_past is the number of positions that are evaluated and kept.
// Tests: tests/model/engine. Python signatures: python/draftwood/engine/_capi.py.
// Experts that do not fit a card, or memory: draftwood-experts.h. Functions that only tests and benchmarks call:
// draftwood-testing.h.

#pragma once

#include "llama.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DW_API LLAMA_API

// raised when a struct or a signature below changes
#define DW_API_VERSION 25

// longest draft; with its root 64 rows
#define DW_MAX_DRAFT 63

// nodes of a tree, root included
#define DW_MAX_TREE 64

// sizes 0 to DW_MAX_DRAFT + 1
#define DW_CURVE_SIZE 65

// best tokens of a row
#define DW_MAX_BEST 64

typedef struct dw_engine dw_engine;

typedef enum dw_status {
    DW_OK              = 0,
    DW_ROUND_END       = 1, // dw_row, dw_last_row: no row is left to sample, start a new round
    DW_ERR_ARGUMENT    = 2, // an argument out of range; nothing was changed
    DW_ERR_UNSUPPORTED = 3, // this model or context cannot do it; nothing was changed but an open round, committed
    DW_ERR_STATE       = 4, // a call out of order; nothing was changed
    DW_ERR_CONTEXT     = 5, // the context is full
    DW_ERR_DECODE   = 6, // llama_decode failed; what the memory holds may be unknown: dw_trim to dw_reach, or dw_reset
    DW_ERR_FILE     = 7, // a model file that is missing, truncated or of another kind
    DW_ERR_INTERNAL = 8, // an exception inside; its text is in dw_last_error()
    DW_ERR_MEMORY   = 9, // not enough memory for a drafter or for the state factors of drafts
} dw_status;

typedef enum dw_drafter_type {
    DW_DRAFTER_NONE   = 0,
    DW_DRAFTER_MTP    = 1, // the model's own NextN block (arXiv:2404.19737; src/models/qwen35moe.cpp graph_mtp)
    DW_DRAFTER_NGRAM  = 2, // what followed the last tokens where they occurred before (prompt lookup)
    DW_DRAFTER_DFLASH = 3, // a block drafter in a file of its own (arXiv:2602.06036; src/models/dflash.cpp)
    DW_DRAFTER_GIVEN  = 4, // the caller drafts: dw_propose_given only
} dw_drafter_type;

// How many tokens dw_propose drafts.
typedef enum dw_length {
    DW_LENGTH_FIXED = 0, // draft_tokens, less where draft_p_min cuts
    // 0 to draft_tokens, from the drafter or from n-grams: whatever is fastest by measured costs and acceptance
    DW_LENGTH_AUTO = 1,
} dw_length;

// What dw_next samples from.
typedef enum dw_results {
    // on a GPU the best tokens of a row if they are enough (dw_request_params.n_top), else its logits; on a CPU logits
    DW_RESULTS_AUTO = 0,
    DW_RESULTS_TOP  = 1, // the best tokens if they are enough, on a CPU too: for tests (test_results.py)
} dw_results;

// What drafting and verifying take, microseconds, 0 where not known: what DW_LENGTH_AUTO decides by.
typedef struct dw_curve {
    uint32_t struct_size;
    int32_t  reserved;
    double   draft_us[DW_CURVE_SIZE];  // [tokens drafted]
    double   verify_us[DW_CURVE_SIZE]; // [rows]
} dw_curve;

typedef struct dw_params {
    uint32_t struct_size;  // sizeof(dw_params), set by dw_params_init
    int32_t  drafter;      // dw_drafter_type
    int32_t  draft_tokens; // longest draft, 1..DW_MAX_DRAFT; n_ubatch must be at least one more
    float    draft_p_min;  // stop drafting when the path's probability falls under this, 0..1
    // Batches of up to this many rows run row-exact kernels on CPU. 0: never, and on a CUDA card no layer runs as fused
    // ops (docs/ops.md)
    int32_t          exact_rows;
    const char *     drafter_path;     // GGUF of a DW_DRAFTER_DFLASH, read during dw_engine_new; else NULL
    int32_t          length;           // dw_length
    int64_t          checkpoint_bytes; // memory for dw_checkpoint, 0: none are kept
    const dw_curve * curve; // from an engine of the same models, settings and machine; NULL: measured at the start
    int32_t tree_budget;    // rows of a verify when drafts are trees, root included, 1..DW_MAX_TREE; 0: chains only
    int32_t seq_id;         // of the context, 0..n_seq_max-1; each may have an engine of its own
    // Tokens that drafts are chosen from, at least 64: the vocabulary's first, and those that texts used of late
    // (src/drafters/short_head.h). 0: on a CPU an eighth of a vocabulary of at least 2048 tokens; on a card for MTP a
    // quarter of one of at least 1024; else all of it. n_vocab or more: all of it
    int32_t draft_vocab;
    int32_t results; // dw_results
    // 1: after a plain greedy step (dw_request_params.n_top = 1), dw_verify of one engine also queues the next step.
    // Its token comes from the device, before the host knows it. If the next dw_verify asks for that token, it takes
    // the queued result; otherwise the step is dropped. This happens without a drafter, and when DW_LENGTH_AUTO has
    // chosen 16 plain steps in a row. It takes qwen35 or qwen35moe with all weights on one device (experts may be in a
    // pool), kv_unified, and one spare sequence (n_seq_max), which the engine owns. 0: each step waits for its token.
    // Test: test_queued_steps.py, test_queued_callers.py, test_queued_pauses.py
    int32_t queue_steps;
    // 1: where drafts stay on a card (n_ahead_rounds), dw_verify of one engine also begins the next draft behind the
    // verify, while the host still looks at it. A DFlash drafter takes the features of all rows. MTP drafts behind each
    // row, as if its best token came next: of a greedy text, for verifies of at most 8 rows, or as many as there are
    // sequences. Experts must be on cards then, none in a pool. 0: a draft begins with dw_propose. dw_params_init sets
    // 1. Test: test_begun_drafts.py
    int32_t begin_drafts;
} dw_params;

// What drafting and sampling know of the next requests.
typedef struct dw_request_params {
    uint32_t struct_size; // sizeof(dw_request_params), set by dw_request_params_init
    float    temperature; // of sampling, 0 for greedy: the probabilities of drafts depend on it
    // How many of the best tokens of a row are enough for the sampler to decide as it would among all: 1 for greedy, k
    // for a chain that begins with top-k; 0: all are needed. Where logits are on a GPU such rows are sampled without
    // them.
    int32_t n_top;
} dw_request_params;

// Draft tokens and their parents. Node 0 is the last emitted token; parents[i] < i, parents[0] = -1. A tree to be
// verified has its nodes ordered by depth.
typedef struct dw_tree {
    uint32_t struct_size;
    int32_t  n; // nodes, 1..DW_MAX_TREE; 0 from dw_get_tree: nothing was proposed yet
    int32_t  tokens[DW_MAX_TREE];
    int32_t  parents[DW_MAX_TREE];
    float    log_probs[DW_MAX_TREE]; // of the path to the node, as the drafter sees it; 0 where it gave none
} dw_tree;

// Counters since the engine was made or dw_stats_reset. Times in microseconds.
typedef struct dw_stats {
    uint32_t struct_size;
    int32_t  reserved;
    int64_t  n_rounds;         // verifies, those without a draft included
    int64_t  n_drafted;        // draft tokens verified, all branches counted
    int64_t  n_accepted;       // draft tokens that the sampler confirmed and the consumer took
    int64_t  n_emitted;        // tokens out of dw_next
    int64_t  n_prompt;         // tokens through dw_eval
    int64_t  n_exact_batches;  // target batches on row-exact kernels
    int64_t  n_cold_rounds;    // rounds without a draft because the drafter lacked a hidden state
    int64_t  n_failed_drafts;  // times the drafter failed, while drafting or reading kept tokens: less is drafted
    int64_t  n_paused_rounds;  // rounds without a draft because plain decode was expected to be faster
    int64_t  n_ngram_rounds;   // with DW_LENGTH_AUTO: drafts by n-grams instead of the drafter asked for
    int64_t  n_tree_rounds;    // rounds whose draft was no chain
    int64_t  n_padding;        // rows beyond the nodes of such trees, up to a size whose graph is kept
    int64_t  n_step_threads;   // rounds of several rows on n_threads, as plain steps: faster there, or tried
    int64_t  n_restored;       // cuts that a checkpoint made possible
    int64_t  n_checkpoints;    // held now
    int64_t  checkpoint_bytes; // that they take
    int64_t  drafter_bytes;    // held now by all engines of this llama_model: KV caches, buffers and short heads
    int64_t  graph_bytes;      // the same, by kept graphs of verifies and drafts; at most 512 MiB
    int64_t  tree_bytes;       // the same, by state factors of draft tokens, from which a commit makes the state
    int64_t  row_limit;        // most rows of a verify, lowered after a larger one ran out of memory; 0: no limit
    int64_t  draft_vocab;      // tokens that the drafter's output head has (dw_params); 0: all
    int64_t  n_shared_rounds;  // since a graph allocation failed: from then on all graph sizes share one buffer
    int64_t  n_ahead_rounds;   // whose draft went into the verify on its device, before the host knew it
    int64_t  n_begun_drafts;   // drafts that began behind the verify before (dw_params.begin_drafts)
    int64_t  n_queued_steps;   // rounds whose step was queued before its token was known
    int64_t  n_dropped_steps;  // steps that were queued and never taken
    int64_t  n_joint_rounds;   // whose draft was made together with other sequences' (dw_propose_all)
    int64_t  n_logits_rows;    // rows that were sampled from all their logits, which came to the host for it
    int64_t  n_launches;       // graphs that GPUs computed in this process
    int64_t  n_replays;        // of them, captured CUDA graphs launched as they were
    int64_t  n_fused_parts; // parts of layers that are one op in the target's newest graph (src/decode/fused_layers.h)
    int64_t  t_draft_us;    // if a draft stays on its device, only the time to queue it
    int64_t  t_verify_us;   // in that case the draft's computation counts here
    int64_t  t_eval_us;
    int64_t  t_sample_us;
    int64_t  t_commit_us;
    int64_t  drafted_at[DW_MAX_DRAFT];  // [depth-1] rounds whose draft reached this depth
    int64_t  accepted_at[DW_MAX_DRAFT]; // [depth-1] of those, how many accepted a token there
} dw_stats;

// The header of a GGUF, read without loading the file.
typedef struct dw_model_info {
    uint32_t struct_size;   // sizeof(dw_model_info), set by the caller
    int32_t  n_layer_nextn; // MTP blocks in the file
    int32_t  can_draft_mtp; // 1 if MTP drafting works for this architecture and file
    int32_t  n_tensors;
    int64_t  file_bytes;
    char     architecture[64];
    int32_t  n_experts;       // of a layer; 0: none
    int32_t  n_experts_used;  // of a layer, by a token
    int32_t  n_expert_layers; // that have some, MTP blocks not counted
    int32_t  n_layers;        // with and without, MTP blocks not counted
    int32_t  n_vocab;
    int32_t  n_ctx_train;  // tokens of the model's own context; 0: the header does not say
    int64_t  expert_bytes; // of all experts of these layers
    int64_t  kv_values;    // that a token adds to the KV caches of all layers, MTP blocks included
    int32_t  n_files;      // that the model is in: sizes are those of all
} dw_model_info;

DW_API int32_t      dw_api_version(void);
DW_API const char * dw_last_error(void); // this thread's; valid until its next failing call
DW_API const char * dw_build_info(void); // JSON: pin version and commit, series hash, build type, compiler

// Read the header of the GGUF at `path` and check that the file is whole.
// Errors: DW_ERR_FILE (missing, not a GGUF, shorter than its tensors, fields that no model can have).
DW_API dw_status dw_probe_model(const char * path, dw_model_info * info);

// Check from the headers of two GGUFs whether the DFlash drafter at `drafter_path` can draft for the model at
// `target_path`. Tensors whose shapes differ from the header are found only at loading.
// Errors: DW_ERR_FILE as above; DW_ERR_UNSUPPORTED for a drafter that does not fit, with the text of dw_engine_new.
DW_API dw_status dw_probe_drafter(const char * drafter_path, const char * target_path);

DW_API void dw_params_init(dw_params * params);

// Attach an engine to `target`. `context_params` are the parameters that `target` was made with; the drafter's own
// context is made from them: by the first engine of a kind, with the KV caches of all n_seq_max sequences, which
// engines of other sequences then share. Free the engine before `target`. With DW_LENGTH_AUTO and no curve, rounds are
// timed first if `target` is empty, which it is afterwards, also after an error; else times are learned from the
// engine's own rounds.
// Errors: DW_ERR_ARGUMENT, DW_ERR_UNSUPPORTED (no MTP block, wrong architecture, n_ubatch too
// small, an engine is already attached), DW_ERR_FILE, DW_ERR_MEMORY (for the drafter), DW_ERR_DECODE and
// DW_ERR_CONTEXT (while rounds are timed).
DW_API dw_status dw_engine_new(struct llama_context * target, const struct llama_context_params * context_params,
                               const dw_params * params, dw_engine ** engine);
DW_API void      dw_engine_free(dw_engine * engine);

// Evaluate tokens i32[n_tokens] at positions n_past.. in one ubatch (n_tokens <= n_ubatch of the context). The sequence
// is cut to n_past first. Logits become available: of the last token, or of all with all_logits. dw_next can sample
// the last row. Errors: DW_ERR_ARGUMENT, also for more logits than the context has room for (n_outputs_max).
DW_API dw_status dw_eval(dw_engine * engine, const llama_token * tokens, int32_t n_tokens, int32_t n_past,
                         bool all_logits);

// Draft up to max_draft tokens after `last`, the token at position n_past, which is not yet evaluated. The draft is cut
// to the room in the context. n_draft (out) may be 0; dw_verify is then a plain step.
DW_API dw_status dw_propose(dw_engine * engine, llama_token last, int32_t max_draft, int32_t * n_draft);

// The same with the caller's draft: i32[n_draft], n_draft <= draft_tokens.
DW_API dw_status dw_propose_given(dw_engine * engine, llama_token last, const llama_token * draft, int32_t n_draft);

// The same with the caller's tree. Node 0 is the newest token; tree->n <= tree_budget.
// Errors: DW_ERR_ARGUMENT (a tree out of order, too large, with a cycle), DW_ERR_UNSUPPORTED (dw_tree_refusal),
// DW_ERR_CONTEXT (every node takes a cell).
DW_API dw_status dw_propose_tree(dw_engine * engine, const dw_tree * tree);

// dw_propose for several engines of one context: last[i], max_draft[i] and n_draft[i] are of engines[i]. Those that
// draft chains with MTP do it together: one decode for each depth, in place of one for each sequence and depth. So do
// those with DFlash: one decode for blocks of a length, up to 64 rows. Other drafts, trees and n-grams, are made one by
// one. A decode has up to n_ubatch rows; without kv_unified, of sequences whose ids follow each other. With
// DW_LENGTH_AUTO chains are as long as is fastest for all engines of the call, by the times of their rounds together;
// with many sequences all may take a plain step (src/round/batch_model.h). Give all of these engines to dw_verify_all.
// Errors: those of dw_propose, for any of them. No engine has a new proposal then; open rounds may be committed.
DW_API dw_status dw_propose_all(dw_engine * const * engines, const llama_token * last, const int32_t * max_draft,
                                int32_t * n_draft, int32_t n_engines);

DW_API void dw_request_params_init(dw_request_params * params); // greedy, all logits

// Set temperature and n_top of the next requests. They hold until the next dw_set_request.
// Errors: DW_ERR_ARGUMENT (a temperature that is negative or no number, a negative n_top).
DW_API dw_status dw_set_request(dw_engine * engine, const dw_request_params * params);

// Decode the proposed tokens; each sees its ancestors. The context is unchanged after an error if llama.cpp found no
// memory or room, or if drafts can be trees and there was a draft. Otherwise its content is unknown (DW_ERR_DECODE).
// If the graph does not fit in memory, the tree is truncated; the limit applies to later rounds too
// (dw_stats.row_limit).
// Errors: DW_ERR_STATE without a proposal, or if others changed the memory since.
DW_API dw_status dw_verify(dw_engine * engine);

// The same for several engines of one context in one decode. Each has its own proposal: a chain, a tree or none.
// Where a card runs parts of layers as ops of ours, all rows together are 16 at most, or one an engine. In a graph
// all have as many rows as its largest. Those with few rows have a graph of their own if that is faster. Drafts are
// shortened where cells or n_batch are too few for all. Without kv_unified there is a graph for each run of
// sequences whose ids follow each other, and in any case one for each n_ubatch rows. An engine that cannot verify
// trees takes a plain step, as one without a drafter does until its first dw_propose_given or dw_propose_tree. While
// such rounds are open, another decode settles them first. On a CPU results are exact, in a unified cache (kv_unified)
// with the exceptions of src/llama/kv_pages.h. On a card they are exact if each sequence has a KV cache of its own.
DW_API dw_status dw_verify_all(dw_engine * const * engines, int32_t n_engines);

// Get the row that dw_next samples next: its index for llama_get_logits_ith, and its n_past.
// Returns DW_ROUND_END when the walk is over.
DW_API dw_status dw_row(dw_engine * engine, int32_t * row, int32_t * n_past);

// The best tokens of a row of the newest verify, for who samples without dw_next: a chain that begins with a choice
// among n tokens or fewer needs no logits. row: of dw_row, any other of that verify, or -1 for the last; after a decode
// with one output all rows stand for it. n: 1..DW_MAX_BEST; tokens i32[n], logits f32[n], best first, of equals the
// smaller token. found: false if nobody looked for them, or something else was decoded since. Errors: DW_ERR_ARGUMENT.
// Test: tests/model/engine/test_results.py, tests/server/test_best_rows.py.
DW_API dw_status dw_best(const struct llama_context * target, int32_t row, int32_t n, llama_token * tokens,
                         float * logits, bool * found);

// Sample the next row with `sampler`, which accepts the token. The walk goes on while samples equal the draft.
// Errors: DW_ERR_STATE if no row is left, DW_ERR_ARGUMENT for a sampler that chooses no token.
DW_API dw_status dw_next(dw_engine * engine, struct llama_sampler * sampler, llama_token * token);

// The same for a caller who has sampled that row, by the index that dw_row gave, and has told the sampler: as a server
// does whose sampling is more than a llama_sampler.
// Errors: DW_ERR_STATE if no row is left, DW_ERR_ARGUMENT for a token that is not in the vocabulary; nothing changed.
DW_API dw_status dw_took(dw_engine * engine, llama_token token);
// The same of a token that a benchmark's schedule chose (llama-server's --spec-synth-rates): drafts go on as if it were
// its row's best.
DW_API dw_status dw_took_scheduled(dw_engine * engine, llama_token token);

// Make the row sampled last available to dw_next once more (its logits are still there).
// Errors: DW_ERR_STATE if no live row stands for n_past.
DW_API dw_status dw_rewind(dw_engine * engine);

// Get that row's index for llama_get_logits_ith, for who samples from it beside the engine; nothing changes.
// Returns DW_ROUND_END if no live row stands for n_past. Test: tests/model/engine/test_trim.py.
DW_API dw_status dw_last_row(dw_engine * engine, int32_t * row);

// Keep the rows that were sampled and free the others, in the target and in the drafter, and drop a step that is queued
// (dw_params.queue_steps). Without either it has no effect. It runs by itself before a raw llama_decode, or a save of
// its sequence. A loop need not call it: dw_propose and dw_trim keep what was sampled. Until it is called, the memory
// may hold rows behind n_past, a queued step's too: call it before llama_memory_seq_pos_max, _seq_cp and their like.
DW_API dw_status dw_commit(dw_engine * engine);

// Let dw_trim go back to the present position, although recurrent layers hold the state behind their last token only.
// Their state and the drafter's are copied; within checkpoint_bytes the least recently used copies go. A checkpoint
// ends with a cut before it, a reset, or what others do to its sequence: a loaded state, a decode, a clear. Without
// recurrent layers, or without memory for a copy, the call has no effect. An open round is committed first.
DW_API dw_status dw_checkpoint(dw_engine * engine);

// The largest position up to n_keep that dw_trim can cut to, the same with drafting on and off (with it, snapshots of
// n_rs_seq would reach a few tokens more). 0: only a reset is left. It also holds after a failed decode.
DW_API int32_t dw_reach(const dw_engine * engine, int32_t n_keep);

// Cut the sequence to n_keep positions.
// Errors: DW_ERR_UNSUPPORTED if recurrent layers cannot go back there; then dw_reset and evaluate anew.
DW_API dw_status dw_trim(dw_engine * engine, int32_t n_keep);

// dw_trim with a state that the caller kept: what llama_state_seq_get_data_ext gave with
// LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY when this text had n_keep positions. A load by llama.cpp's own call makes the
// drafter begin anew.
// Errors: DW_ERR_ARGUMENT; DW_ERR_DECODE for a state that does not fit.
DW_API dw_status dw_restore(dw_engine * engine, const void * state, size_t n_bytes, int32_t n_keep);

// The llama_context that the engine's drafter keeps its part of the sequence in, under the same id; NULL: it keeps
// none. What was evaluated so far is in it when the call returns. A caller may save this part, load it behind the
// target's, or copy it to a sequence whose engine was reset. Leave all else in it alone. Errors: DW_ERR_DECODE.
DW_API dw_status dw_drafter_memory(dw_engine * engine, struct llama_context ** memory);

// Forget everything: target memory, drafter memory, open round.
DW_API dw_status dw_reset(dw_engine * engine);

DW_API int32_t   dw_n_past(const dw_engine * engine);
DW_API int32_t   dw_draft_tokens(const dw_engine * engine);
DW_API dw_status dw_get_draft(dw_engine * engine, llama_token * tokens, int32_t * n_tokens); // i32[DW_MAX_DRAFT]
DW_API dw_status dw_get_tree(dw_engine * engine, dw_tree * tree);                            // the newest proposal
// Why this context cannot verify draft trees; "" if it can, NULL without an engine. Valid until the engine's next call.
DW_API const char * dw_tree_refusal(const dw_engine * engine);
// Counters, times and memory held now.
DW_API dw_status dw_get_stats(const dw_engine * engine, dw_stats * stats);
// The times of rounds so far, the newest included. Call it between requests: it changes their choices.
DW_API dw_status dw_get_curve(dw_engine * engine, dw_curve * curve);
DW_API dw_status dw_stats_reset(dw_engine * engine);

#ifdef __cplusplus
}
#endif
