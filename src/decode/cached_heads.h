// Heads on their way into a KV cache, as llama.cpp's graphs have them: turned keys and queries, and rows that are
// written. Test: tests/model/test_fused_layers.py.

#pragma once

#include "decode/graph_edit.h"
#include "decode/pattern.h"
#include "ops/layer-parts/layer-parts.h"

#include <algorithm>
#include <cstring>

namespace draftwood {

namespace parts = dw::layer_parts;

// The transform of a tensor that nothing else reads: reshaped to blocks, multiplied, and reshaped back.
struct hadamard {
    ggml_tensor * result = nullptr;
    int32_t       n      = 0; // values of a block

    static hadamard of(const ggml_tensor * tensor, const graph_edit & edit) {
        ggml_tensor * blocks = as(edit.only_user(tensor), GGML_OP_RESHAPE);
        while (ggml_tensor * next = as(edit.only_user(blocks), GGML_OP_RESHAPE)) {
            blocks = next;
        }
        ggml_tensor * product = edit.only_user(blocks);
        ggml_tensor * result  = as(edit.only_user(product), GGML_OP_RESHAPE);
        const bool    is_it   = result && is_hadamard(product) && product->src[1] == blocks;
        return is_it ? hadamard{ result, (int32_t) product->ne[0] } : hadamard{};
    }
    explicit operator bool() const { return result != nullptr; }
};

// rope(rms_norm(heads) * weights), and its transform if there is one: queries or keys
struct turned_heads {
    ggml_tensor *   result    = nullptr;
    ggml_tensor *   heads     = nullptr; // [S, H, n]
    ggml_tensor *   weights   = nullptr;
    ggml_tensor *   positions = nullptr;
    parts::settings with;

    // product: the heads are it, reshaped, or a view of it
    static turned_heads of(ggml_tensor * product, const graph_edit & edit) {
        for (ggml_tensor * part : edit.users(product)) {
            ggml_tensor * normal = as(edit.only_user(part), GGML_OP_RMS_NORM);
            ggml_tensor * scaled = edit.only_user(normal);
            ggml_tensor * rope   = as(edit.only_user(scaled), GGML_OP_ROPE);
            const norm    found  = scaled ? norm::of(scaled) : norm{};
            if (rope && found && rope->src[0] == scaled) {
                const hadamard behind = hadamard::of(rope, edit);
                turned_heads   heads{ behind ? behind.result : rope, part, found.weights, rope->src[1], {} };
                heads.with.k_hadamard = behind.n;
                return heads.read(*rope, found.epsilon) ? heads : turned_heads{};
            }
        }
        return {};
    }
    explicit operator bool() const { return result != nullptr; }

    bool turns_as(const turned_heads & other) const {
        return positions == other.positions && std::memcmp(&with, &other.with, sizeof(with)) == 0;
    }

  private:
    // ggml_rope_impl's parameters; false: others than rotation.h knows
    bool read(const ggml_tensor & rope, float epsilon) {
        int32_t whole[16];
        float   real[16];
        std::memcpy(whole, rope.op_params, sizeof(whole));
        std::memcpy(real, rope.op_params, sizeof(real));
        const int32_t mode      = whole[2];
        const bool    is_scaled = real[7] != 0.0f || real[8] != 1.0f || rope.src[2]; // YaRN, factors of a file
        // a DFlash drafter's sections: all pairs turn by time, as in one section of one pair
        const bool has_time_alone =
            mode == GGML_ROPE_TYPE_MROPE && whole[11] > 0 && whole[12] == 0 && whole[13] == 0 && whole[14] == 0;
        if (is_scaled || whole[15] != 0 ||
            (mode != GGML_ROPE_TYPE_NEOX && mode != GGML_ROPE_TYPE_IMROPE && !has_time_alone)) {
            return false;
        }
        with.epsilon = epsilon;
        with.n_dims  = whole[1];
        with.base    = real[5];
        with.scale   = real[6];
        for (int i = 0; i < 4; ++i) {
            with.sections[i] = mode == GGML_ROPE_TYPE_IMROPE ? (uint8_t) std::clamp(whole[11 + i], 0, 255) : 0;
        }
        with.sections[0] = has_time_alone ? 1 : with.sections[0];
        return rope.ne[0] <= parts::max_head && with.n_dims % 2 == 0 && ggml_is_contiguous(&rope) &&
               rope.type == GGML_TYPE_F32 && weights->ne[0] == rope.ne[0];
    }
};

// Rows of a batch that go into rows of a KV cache.
struct cache_write {
    ggml_tensor * node  = nullptr; // SET_ROWS
    ggml_tensor * cells = nullptr;
    ggml_tensor * cache = nullptr;

    // rows: a view of them, or themselves, is written
    static cache_write of(ggml_tensor * rows, const graph_edit & edit) {
        ggml_tensor * user = edit.only_user(rows);
        ggml_tensor * node =
            as(as(user, GGML_OP_VIEW) || as(user, GGML_OP_RESHAPE) ? edit.only_user(user) : user, GGML_OP_SET_ROWS);
        if (!node || !parts::is_heads_type(node->type) || !edit.users(node).empty() ||
            node->src[0]->ne[0] != node->src[2]->ne[0] || node->src[0]->type != GGML_TYPE_F32 ||
            node->src[1]->type != GGML_TYPE_I64) {
            return {};
        }
        return { node, node->src[1], node->src[2] };
    }
    explicit operator bool() const { return node != nullptr; }
};

} // namespace draftwood
