// Experts of a layer that lie partly in device memory: an op behind the router that makes room for the chosen ones.
//
// The weights of a layer's experts are up to max_parts tensors ("parts": gate, up and down, or both in one). Each part
// is one range of addresses. First comes every expert in host memory, as the file has them; behind it lie the slots, in
// device memory:
//
//     part   | expert 0 | expert 1 | ... | expert E-1 | (up to a page) | slot 0 | slot 1 | ... | slot H-1 |
//     index  | 0        | 1        | ... | E-1        |                | first_slot ...                    |
//
// Products read such a part as one tensor of first_slot + H experts. An index under E reads from the host, in place; an
// index from first_slot on reads a slot. Parts whose experts differ in size may differ in first_slot. A table says
// which expert lies in which slot. It lies on the device and changes there, so a captured graph stays valid whatever is
// resident. Evicting an expert is a write to the table.
//
// The op, once a layer and step: the distinct experts of all rows are looked up. A resident one gives its slot. For a
// missing one the resident expert that is least worth keeping goes (policy.h), and the missing one is copied from the
// host into its slot. Experts of this step are never evicted in it: with more of them than slots, the rest is read in
// place. Batches of more than max_fill_rows rows evict nothing: what is not resident is read in place, once for all
// rows that chose it. From least_staged_rows rows on it is copied ahead, if the pool has a stage (stage.h): behind the
// slots then lie indices of all experts once more, in memory that layers share.
//
// An op in the layer before may have fetched experts ahead (guess.h).
//
// On a card a step with guesses does not wait for copies before its products begin: the index of an expert that is on
// its way is complemented (~index), and whoever reads it waits (arrivals.cuh). Where fused products look into the table
// for themselves, they do not wait for the op either: it runs beside them, and what it changes is not what they read.
// An expert that the step chose keeps its slot, or gets one.
//
// A second op, dw_expert_ready, gives the indices to the products. Where experts are fetched ahead and a layer is
// llama.cpp's nodes, the first op runs beside what stands between the two, and the second one waits for it. Whoever
// builds the graph says whether anything stands there (copy-streams.h).
//
// Test: tests/ops/test_expert_slots.py (a model in Python, step by step), tests/model/test_expert_pool.py (logits
// bit-equal to a model that lies in one memory), tests/gpu/test_expert_pool_cuda.py.

#pragma once

#include "ops/door/custom-op.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace dw::expert_slots {

constexpr int32_t max_parts      = 3;
constexpr int32_t max_experts    = 1024; // of a layer
constexpr int32_t max_fill_rows  = 64;   // a verify; prompts have more
constexpr int32_t max_picks      = 2048; // rows times experts a row, of a step that fills
constexpr int32_t max_guesses    = 64;   // experts of a layer that are fetched ahead of a step
constexpr int32_t max_guess_rows = 8;

constexpr uint32_t n_arrivals = 64; // what the copies of a part into a slot add up to

constexpr int32_t least_staged_rows = 512; // most experts have a row, so all of them are copied

enum class policy : int32_t {
    frequency, // evicts the expert used least of late: a count that halves every 64 steps, then the time of last use
    lru,       // evicts the expert used longest ago
};

// An expert in the table. One that was never used has heat and recency 0, or what it began with.
struct entry {
    uint64_t recency; // of the last use: step * max_picks + the pick's place in its step + 1
    uint32_t heat;    // uses, in 1/256, as of `epoch`
    uint32_t epoch;   // steps / 64 when heat was last brought up to date
    int32_t  slot;    // -1: on the host alone
    uint32_t guessed; // step that it was fetched for before its router had chosen (guess.h); 0: none
};

// Distinct experts of a layer and step, counted since the start.
struct counters {
    uint64_t n_steps;
    uint64_t n_hits;     // that were resident
    uint64_t n_misses;   // that were copied into a slot
    uint64_t n_in_place; // that were read from the host
    uint64_t n_guessed;  // that were fetched ahead
    uint64_t n_right;    // of these, that the next step chose
    uint64_t n_late;     // waits for an expert that ended without it: it was read from the host (arrivals.cuh)
};

struct fill {
    int32_t expert, slot;
};

// Of one layer, on the device that runs it. Launches in one stream change it in order.
struct table {
    counters counted;
    uint32_t step;      // of the newest one that could fill
    int32_t  n_fills;   // of the newest step
    int32_t  n_guesses; // for the step that comes
    int32_t  reserved;
    fill     fills[max_experts];
    fill     guesses[max_guesses];
    entry    entries[max_experts];

    // By slot, on a card alone. An expert is there when n_arrivals times the first equals the second.
    uint32_t n_given[max_experts];              // experts that got it
    uint32_t n_arrived[max_experts][max_parts]; // what copies of its parts added
    uint32_t n_all_given, n_all_arrived; // sums of these. All is there when n_arrivals n_parts n_all_given arrived

    uint32_t is_found; // 1: this step's result is there, for products beside the op. Guesses for this layer make it 0
};

static_assert(offsetof(table, n_all_given) % 8 == 0, "both sums are read at once");

struct part {
    char *  base;   // expert 0
    int64_t stride; // bytes of an expert
    int32_t plane;  // of the op's result, which has its indices
};

struct stage;
struct copy_streams;

// What a node's layer pointer points to. It belongs to the pool (experts/pool.h), which outlives the model's graphs.
struct layer {
    int32_t n_experts, n_slots, n_parts, n_planes;
    policy  victims;
    part    parts[max_parts];
    int32_t first_slots[max_parts];  // index of slot 0, by plane; no two planes are alike
    int32_t first_staged[max_parts]; // index of expert 0 in the stage, by plane
    table * state;

    copy_streams * copies; // copy-streams.h; nullptr: all runs in the stream of the step

    stage *       staged; // nullptr: none
    int32_t       place;  // of it, 0 or 1
    const layer * next;   // the one that follows, whose experts may be copied while this one computes; nullptr: none

    int64_t slot_offset(const part & of, int32_t slot) const { return (first_slots[of.plane] + slot) * of.stride; }

    bool stages(int64_t n_rows) const { return staged && n_rows >= least_staged_rows; }

    // indices that a product of so many rows may meet
    int32_t n_indices(const part & of, int64_t n_rows) const {
        return stages(n_rows) ? first_staged[of.plane] + n_experts : first_slots[of.plane] + n_slots;
    }
};

// Finds where each chosen expert is to be read.
//   dst i32[k, R, n_planes]. With guesses, on CUDA, indices of experts on their way are complemented
//   ids i32[k, R], rows may be strided: the router's choice. With the flag `chooses`, on CUDA, a view of an open
//   dw_choice (layer-parts.h): its rows are written here, from the logits behind them
//   guesses i32[at least number_of(node) + k, R]: of a row, from number_of(node) on, what the router of layer.next
//   would choose of the same input, R at most max_guess_rows. Missing ones of them are fetched as dw_expert_guess does
//   (guess.h), while this layer computes. On a card this layer's own are then copied in the second queue, too. A batch
//   that only looks up has none
enum src { ids, guesses, n_src };
constexpr const char *     operands[n_src] = { "ids", "guesses" };
constexpr op_signature     signature       = { "dw_expert_slots", operands, n_src, /*n_optional*/ 1 };
extern const op_descriptor on_cpu, on_cuda;

// Waits for the copies. In place: what reads its result stands behind it.
//   indices i32[k, R, n_planes], of dw_expert_slots
//   choice  its ids: their memory must not be used again before they were read
enum ready_src { indices, choice, n_ready_src };
constexpr const char *     ready_operands[n_ready_src] = { "indices", "choice" };
constexpr op_signature     ready_signature             = { "dw_expert_ready", ready_operands, n_ready_src };
extern const op_descriptor ready_on_cpu, ready_on_cuda;

// What the builder of a graph says of a dw_expert_slots node (experts/product.cpp). Behind the layer pointer, a byte
// each.
enum flag : size_t {
    has_next,       // the graph has the next layer with as many rows, so that its experts can be copied ahead
    next_is_joined, // and nothing between the two can run on another device: both are captured into one CUDA graph
    copies_beside,  // nodes stand between this one and its dw_expert_ready
    chooses,        // ids are the first of an open dw_choice, and guesses, if any, its rows
    n_flags,
};
constexpr size_t flags_at = layer_at + sizeof(void *);

// Behind the flags: of dw_expert_guess the experts of a row, of dw_expert_slots with guesses where a row has them.
constexpr size_t number_at = flags_at + n_flags;

// Behind that, of dw_expert_slots: where a dw_chosen_experts alone reads the result, the blocks that its kernels of one
// row have at most. It can look into the table for itself. 0: others read the result.
constexpr size_t blocks_at = number_at + sizeof(int32_t);
static_assert(blocks_at + sizeof(int32_t) <= GGML_MAX_OP_PARAMS, "it fits");

// number_at, blocks_at
template <size_t at> int32_t param_of(const ggml_tensor * node) {
    int32_t n;
    std::memcpy(&n, (const char *) node->op_params + at, sizeof(n));
    return n;
}

template <size_t at> void set_param(ggml_tensor * node, int32_t n) {
    std::memcpy((char *) node->op_params + at, &n, sizeof(n));
}

inline int32_t number_of(const ggml_tensor * node) {
    return param_of<number_at>(node);
}

inline void set_number(ggml_tensor * node, int32_t n) {
    set_param<number_at>(node, n);
}

inline int32_t blocks_of(const ggml_tensor * node) {
    return param_of<blocks_at>(node);
}

inline void set_blocks(ggml_tensor * node, int32_t n) {
    set_param<blocks_at>(node, n);
}

inline bool has(const ggml_tensor * node, flag which) {
    return ((const char *) node->op_params)[flags_at + which] != 0;
}

inline void set(ggml_tensor * node, flag which) {
    ((char *) node->op_params)[flags_at + which] = 1;
}

// The layer whose guesses a dw_expert_slots node has: on CUDA indices may be complemented. nullptr: none, or there is
// no queue for them.
inline const layer * guessed_by(const ggml_tensor * node) {
    const layer & of = *(const layer *) layer_of(node);
    return node->src[guesses] && of.next && of.next->copies ? of.next : nullptr;
}

// A batch that looks up and fills nothing: a prompt, or llama.cpp's warm-up, which chooses every expert.
inline bool only_looks_up(const layer & of, int64_t n_used, int64_t n_rows) {
    return n_rows > max_fill_rows || n_rows * n_used > max_picks || n_used >= of.n_experts;
}

} // namespace dw::expert_slots
