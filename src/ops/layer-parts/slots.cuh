// Shared memory for the slots of a block's warps, on the host: pieces.cuh says what a slot is. Test:
// tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/door/chain.cuh"
#include "ops/layer-parts/pieces.cuh"

#include <algorithm>

namespace dw::layer_parts {

// Bytes of a slot of a type, and values of a row that it holds; 0 bytes: the type is not tiled.
template <ggml_type type> constexpr int2 size_of_slot() {
    return { tiled<type>::slot_bytes, tiled<type>::n_values };
}

inline int2 size_of_slot(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_K:
            return size_of_slot<GGML_TYPE_Q4_K>();
        case GGML_TYPE_Q5_K:
            return size_of_slot<GGML_TYPE_Q5_K>();
        case GGML_TYPE_Q6_K:
            return size_of_slot<GGML_TYPE_Q6_K>();
        case GGML_TYPE_Q8_0:
            return size_of_slot<GGML_TYPE_Q8_0>();
        case GGML_TYPE_IQ4_XS:
            return size_of_slot<GGML_TYPE_IQ4_XS>();
        default:
            return is_byte_tiled(type) ? size_of_slot<byte_tiles>() : int2{ 0, 1 << 20 };
    }
}

inline int bytes_of_slot(ggml_type type) {
    return size_of_slot(type).x;
}

inline int values_of_slot(ggml_type type) {
    return size_of_slot(type).y;
}

// Bytes of a warp with n slots of a type, and a place for the bytes that it makes of byte tiles.
inline int bytes_of_slots(ggml_type type, int n) {
    return n * bytes_of_slot(type) + (is_byte_tiled(type) ? tiled<byte_tiles>::made_bytes : 0);
}

// Shared memory of a block that multiplies tiles: slots of its warps, then what else it needs, then grids of its types.
struct tile_launch {
    tile_plan plan;
    size_t    bytes;

    // n_values: of a row, for one warp; others: bytes beside the slots
    tile_launch(const ggml_type * types, int n_types, int64_t n_values, int n_warps, size_t others) {
        const size_t grids    = bytes_of_grids(types, n_types);
        const auto   of_slots = [&](int n) { // a warp has strips of one type, and slots for the largest
            int most = 0;
            for (int i = 0; i < n_types; ++i) {
                most = std::max(most, bytes_of_slots(types[i], n));
            }
            return most;
        };
        const bool is_long =
            std::any_of(types, types + n_types, [&](ggml_type type) { return values_of_slot(type) < n_values; });
        plan.n_slots = is_long ? most_slots : 1;
        while (plan.n_slots > 1 && n_warps * of_slots(plan.n_slots) + others + grids > shared_memory_of_block()) {
            --plan.n_slots;
        }
        plan.slots_of_a_warp = of_slots(plan.n_slots);
        plan.grids_at        = (int) GGML_PAD(n_warps * plan.slots_of_a_warp + others, 16);
        bytes                = grids > 0 ? plan.grids_at + grids : n_warps * plan.slots_of_a_warp + others;
    }
};

} // namespace dw::layer_parts
