// Logits and tokens of dw_top_rows as integers, which a warp compares and reduces. Must not know: parts of rows.

#pragma once

#include "common.cuh"

#include <cstdint>

namespace dw::top_rows {

// A token as one integer: its logit in an order of unsigned integers, then its id, smaller ids greater. No two are
// equal, so ties need no care. 0: none.
using token_key = unsigned long long;

// Integers in the order of logits. Both zeros are equal; 0: a NaN, under all numbers.
__device__ __forceinline__ uint32_t order_of(float logit) {
    const uint32_t bits      = __float_as_uint(logit);
    const uint32_t magnitude = bits << 1;
    const uint32_t flipped   = bits ^ ((uint32_t) ((int32_t) bits >> 31) | 0x80000000);
    return magnitude > 0xff000000 ? 0 : magnitude == 0 ? 0x80000000 : flipped;
}

// NaN for a NaN
__device__ __forceinline__ float logit_of(uint32_t order) {
    return __uint_as_float(order ^ (~(uint32_t) ((int32_t) order >> 31) | 0x80000000));
}

__device__ __forceinline__ token_key key_of(uint32_t order, uint32_t id) {
    return (token_key) order << 32 | ~id;
}

__device__ __forceinline__ uint32_t id_of(token_key key) {
    return ~(uint32_t) key;
}

__device__ __forceinline__ uint32_t order_of(token_key key) {
    return (uint32_t) (key >> 32);
}

// the greatest logit that is a number; -inf: there is none
__device__ __forceinline__ float max_of(token_key best) {
    return order_of(best) ? logit_of(order_of(best)) : -INFINITY;
}

// x - max; of equal infinities, too
__device__ __forceinline__ float below(float x, float max) {
    return x == max ? 0.0f : x - max;
}

__device__ __forceinline__ token_key better(token_key a, token_key b) {
    return a > b ? a : b;
}

// over the lanes of a warp; each gets it
__device__ __forceinline__ float sum_of_lanes(float x) {
    for (int offset = 16; offset > 0; offset /= 2) {
        x += __shfl_xor_sync(0xffffffff, x, offset);
    }
    return x;
}

} // namespace dw::top_rows
