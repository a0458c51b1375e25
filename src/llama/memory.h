// A llama_context's memory as verifies and drafters use it: KV cells, and the recurrent states of hybrid models. All of
// it is a view: the context owns the memory. Must not know: trees, rounds, drafters.
// Test: tests/model/engine/test_trees.py, test_sequences.py (cells lie as after plain decoding), test_little_memory.py.

#pragma once

#include "llama.h"
#include "llama/row_copies.h"

#include <cstdint>
#include <optional>
#include <vector>

struct ggml_tensor;
class llama_memory_hybrid;

namespace draftwood {

constexpr uint32_t llama_kv_step = 256; // llama.cpp's own

// n_kv of a context's graphs grows in steps of so many cells. No effect on memories whose parts depend on each other.
void set_kv_step(llama_context * ctx, uint32_t n_cells) noexcept;

// Sequences that share its KV cache have pages of it (kv_pages.h). No effect if each has a cache of its own. Of a pair
// of caches only the one of all positions has pages, so texts of models with sliding windows still round by each other.
void keep_in_pages(llama_context * ctx, bool on) noexcept;

// Masks of its graphs are filled by dw_hook_kq_mask where it can.
void fill_masks(llama_context * ctx, bool on) noexcept;

// Free cells of the sequence's KV cache. Where some layers have a sliding window, of the cache that keeps all
// positions. INT32_MAX for memories that set_kv_step has no effect on.
int32_t free_cells(llama_context * ctx, llama_seq_id seq);

// cells that a sequence may have in the plain KV cache of a context. Throws std::bad_cast if it has another memory
int64_t n_kv_cells(const llama_context * ctx);

// llama_memory_seq_rm(memory, seq, pos, -1) of one sequence, 0 <= seq < n_seq_max. It does not look at each cell of
// caches beside which there is no recurrent state: a context may have many. Test: tests/model/test_kq_mask.py.
bool remove_from(llama_context * ctx, llama_seq_id seq, llama_pos pos);

// Frees these cells of the plain KV cache of a context, all of sequence `seq`, and lets the cache search from its first
// free cell again. Throws std::bad_cast if the context has another memory.
void drop_cells(llama_context * ctx, llama_seq_id seq, const std::vector<uint32_t> & cells);

// The memory of a model with attention and recurrent layers.
class hybrid_memory {
  public:
    struct recurrent_layer {
        int32_t       il;
        ggml_tensor * states;      // [S*S*H, n_cells]
        ggml_tensor * conv_states; // [(W-1)*C, n_cells]
    };
    struct attention_layer {
        int32_t       il;
        ggml_tensor * keys;       // [n_embd, n_cells, n_streams]
        ggml_tensor * values;     // the same, or [n_cells, n_embd, n_streams]
        bool          transposed; // the second
    };

    // nullopt if the context has another memory
    static std::optional<hybrid_memory> of(const llama_context * ctx);

    std::vector<recurrent_layer> recurrent_layers() const;
    std::vector<attention_layer> attention_layers() const;
    int64_t                      n_kv_cells() const; // of one stream

    // the cell of the sequence's recurrent state; -1: none
    int32_t state_cell(llama_seq_id seq) const;
    // The sequence has a state of its own that the next decode reads in place. It has none after a copy between
    // sequences, and none in place while a snapshot is to be restored.
    bool has_own_state(llama_seq_id seq) const;
    // Each of these sequences has one, and a verify of them can leave it where it is: put_home(), between the verify's
    // inputs and its graph, says so in the cells.
    bool are_home(const std::vector<llama_seq_id> & sequences) const;
    void put_home() noexcept;
    // The sequence's own state is that of cell `to` from now on, which is free. Returns the copies that make it so;
    // none: it is there already, or `to` is not free. Throws std::bad_alloc.
    std::vector<row_piece> move_state(llama_seq_id seq, int32_t to);
    // position that the sequence's state stands for; it must have one
    llama_pos state_pos(llama_seq_id seq) const;
    void      set_state_pos(llama_seq_id seq, llama_pos pos);

    // The rows of a sequence were moved so that `tokens` lie in the first of these cells, at positions pos.. . Says so
    // in the cells, and frees those behind.
    void rename_cells(llama_seq_id seq, const std::vector<uint32_t> & cells, llama_pos pos,
                      const std::vector<llama_token> & tokens, bool two_dimensional);

  private:
    explicit hybrid_memory(llama_memory_hybrid * memory) :
        memory_(memory) {}

    llama_memory_hybrid * memory_;
};

} // namespace draftwood
