// What llama-server was asked to draft with, where that is ours. llama.cpp's common_params hold it, so that it travels
// with the other arguments. Must not know: llama.cpp, the engine. Test: tests/server/test_arguments.py.

#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

struct dw_spec {
    std::string type;              // of --spec-type; empty: one of llama.cpp's, or none
    int32_t     n_max     = 0;     // of --spec-draft-n-max; 0: by type
    bool        loads_mtp = false; // the model is loaded with its MTP block

    // What the type comes to for a model (draftwood::resolve).
    bool        resolved = false;
    std::string refusal;           // why not; the server ends with it
    std::string drafter_path;      // of a DFlash drafter
    int32_t     drafter       = 0; // dw_drafter_type
    int32_t     draft_tokens  = 0;
    int32_t     tree_budget   = 0;
    bool        chooses       = false; // DW_LENGTH_AUTO
    bool        begins_drafts = true;  // behind a verify (dw_params.begin_drafts)
    bool        queues_steps  = false; // of a greedy text, where one slot generates (dw_params.queue_steps)

    std::vector<double> rates; // of --spec-synth-rates or --spec-synth-len: a benchmark's (schedule.h)

    // Takes a value of --spec-type. Returns false if it is llama.cpp's.
    bool take(const std::string & value) {
        static const char * const ours[]  = { "auto", "mtp", "dflash", "ngram", "tree", "plain" };
        const bool                is_ours = std::find(std::begin(ours), std::end(ours), value) != std::end(ours);
        type                              = is_ours ? value : "";
        return is_ours;
    }

    // llama.cpp's list of types with ours in front, for --help
    static const char * with_types(const char * theirs) {
        static const std::string all = std::string("auto,mtp,dflash,ngram,tree,plain,") + theirs;
        return all.c_str();
    }

    // A step that is queued needs a sequence more, which shares the slots' cells. llama.cpp wants room for a row of
    // each. Params: llama_context_params.
    template <typename Params> void make_room(Params & context) const {
        if (queues_steps) {
            context.n_seq_max++;
            context.n_outputs_max += context.n_outputs_max > 0 ? 1 : 0;
            context.kv_unified = true;
        }
    }

    // Rows of a slot's verify beside the newest token's, at most. A joint verify rounds them up to a size whose graph
    // is kept; no such size is beyond the next power of two.
    int32_t most_drafts() const {
        const int32_t n_rows = std::max(draft_tokens + 1, tree_budget);
        int32_t       most   = 1;
        while (most < n_rows) {
            most *= 2;
        }
        return most - 1;
    }
};
