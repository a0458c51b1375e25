// What all ops of layer-parts.h share: the types and sizes that they take, and what a node says beside its operands.
// Must not know: what they compute. Test: tests/ops/test_layer_parts.py, tests/unit/test_fused.py.

#pragma once

#include "ops/door/custom-op.h"

#include <cstdint>
#include <cstring>

namespace dw::layer_parts {

constexpr int64_t max_rows    = 16;
constexpr int64_t max_experts = 512;
constexpr int64_t max_used    = 16;    // experts of a row
constexpr int64_t max_head    = 256;   // S of attention heads
constexpr int64_t max_width   = 16384; // D: a block of 1024 threads normalises 16 values a thread

// What a block of kernels has on CUDA: hidden values of a network, and outputs of all.
constexpr int hidden_of_a_block  = 32;
constexpr int outputs_of_a_block = 16;

// Blocks that a kernel of one row's n_used experts has at most.
constexpr int32_t blocks_of_row(int64_t n_hidden, int64_t width, int64_t n_used) {
    const int64_t above = (n_hidden + hidden_of_a_block - 1) / hidden_of_a_block * n_used;
    const int64_t below = width / outputs_of_a_block;
    return (int32_t) (above > below ? above : below);
}

// Types of weights that tensor cores, or sums of floats, read as they lie.
constexpr ggml_type direct_types[] = { GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16, GGML_TYPE_Q8_0,
                                       GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_XS };

// And those whose tiles of `byte_tile` values become bytes first: byte-tiles.cuh.
constexpr ggml_type byte_tiled_types[] = { GGML_TYPE_Q4_0,  GGML_TYPE_IQ4_NL,  GGML_TYPE_MXFP4,
                                           GGML_TYPE_Q3_K,  GGML_TYPE_IQ3_XXS, GGML_TYPE_IQ3_S,
                                           GGML_TYPE_IQ2_S, GGML_TYPE_IQ2_XS,  GGML_TYPE_IQ2_XXS };
constexpr int64_t   byte_tile          = 256;
constexpr ggml_type byte_tiles         = GGML_TYPE_COUNT; // stands for all of them

constexpr bool is_float(ggml_type type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
}

// S of flash_attention
constexpr bool is_attention_size(int64_t size) {
    return size == 64 || size == 128 || size == 256;
}

// Types of a KV cache that attention_heads writes.
constexpr bool is_heads_type(ggml_type type) {
    return type == GGML_TYPE_F16 || type == GGML_TYPE_F32 || type == GGML_TYPE_Q8_0;
}

// Types of a KV cache whose keys and values flash_attention reads.
constexpr bool is_attention_type(ggml_type type) {
    return type == GGML_TYPE_F16 || type == GGML_TYPE_Q8_0;
}

template <size_t n> constexpr bool is_one_of(const ggml_type (&types)[n], ggml_type type) {
    for (ggml_type each : types) {
        if (each == type) {
            return true;
        }
    }
    return false;
}

constexpr bool is_byte_tiled(ggml_type type) {
    return is_one_of(byte_tiled_types, type);
}

constexpr bool is_product_type(ggml_type type) {
    return is_one_of(direct_types, type) || is_byte_tiled(type);
}

// Whether rows of weights may have so many values.
inline bool is_product_width(ggml_type type, int64_t width) {
    return width % (is_byte_tiled(type) ? byte_tile : ggml_blck_size(type)) == 0;
}

// What a node says beside its operands. It lies behind the layer pointer and fills what is left of op_params, so fields
// that no op has both of share their place.
struct settings {
    float epsilon = 0.0f; // of the norm
    union {
        int32_t n_used = 0; // k
        int32_t k_hadamard; // values of a key, and of a query, that are transformed together; 0: none (hadamard.h)
    };
    union {
        int32_t is_joint = 0; // gate and up are one tensor of 2 F rows, the gate's first; both operands name it
        int32_t is_open;      // the dw_expert_slots behind dw_choice chooses
    };
    union {
        int32_t size = 0;  // S, of a head
        int32_t n_dims;    // values of a head that turn with its position
        int32_t n_experts; // E
    };
    union {
        int32_t n_keys = 0; // Hk, key heads
        int32_t v_hadamard; // as k_hadamard, of values
    };
    union {
        uint8_t planes[4] = {}; // of the indices of gate and up, and of down; then unused
        uint8_t sections[4];    // of pairs, by the position that they take
    };
    float base = 0.0f, scale = 0.0f; // of angles: rotation.h
};
constexpr size_t settings_at = layer_at + sizeof(void *);
static_assert(settings_at + sizeof(settings) <= GGML_MAX_OP_PARAMS, "settings fit");

inline settings settings_of(const ggml_tensor * node) {
    settings of;
    std::memcpy(&of, (const char *) node->op_params + settings_at, sizeof(of));
    return of;
}

inline void set(ggml_tensor * node, const settings & to) {
    std::memcpy((char *) node->op_params + settings_at, &to, sizeof(to));
}

} // namespace dw::layer_parts
