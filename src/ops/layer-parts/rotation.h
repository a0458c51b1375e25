// How heads of an attention layer turn with their position (RoFormer, arXiv:2104.09864), for both versions of
// dw_attention_heads. Values i and i + n_dims / 2 of a head are a pair, in NeoX's order. Must not know: graphs.
// Test: tests/ops/test_layer_parts.py.

#pragma once

#include "ops/layer-parts/layer-parts.h"

#ifdef __CUDACC__
#define DW_ROTATION __host__ __device__ inline
#else
#include <cmath>
#define DW_ROTATION inline
#endif

namespace dw::layer_parts {

DW_ROTATION int pairs_of_sections(const settings & with) {
    return with.sections[0] + with.sections[1] + with.sections[2] + with.sections[3];
}

// Which of a row's four positions a pair takes. Pairs alternate between time, height and width while each section
// lasts; the rest take the fourth (ggml's GGML_ROPE_TYPE_IMROPE). Without sections rows have one position.
DW_ROTATION int position_of(int pair, const settings & with) {
    const int n = pairs_of_sections(with);
    if (n == 0) {
        return 0;
    }
    const int at = pair % n;
    return at < 3 * with.sections[at % 3] ? at % 3 : 3;
}

// The quotient of two neighbouring pairs' frequencies.
inline float step_of(const settings & with) {
    return powf(with.base, -2.0f / with.n_dims);
}

// Turns of a pair for each step of its position. The power is ggml's, with its rounding: keys of a prompt were turned
// by ggml, and an error of the frequency cancels only between queries and keys that share it.
DW_ROTATION double turns_of(int pair, float step, float scale) {
    constexpr double whole = 6.283185307179586;
    return (double) powf(step, (float) pair) * scale / whole;
}

// The part of a turn that is left without whole ones, -0.5 to 0.5: float has digits enough for that.
DW_ROTATION double part_of_turn(double turns) {
    return turns - rint(turns);
}

} // namespace dw::layer_parts

#undef DW_ROTATION
