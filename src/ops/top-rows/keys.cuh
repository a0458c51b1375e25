// Logits and tokens of dw_top_rows as integers, which warps compare and reduce. Must not know: parts of rows.
// Test: tests/ops/test_top_rows.py.

#pragma once

#include "ops/door/lanes.cuh"

#include <cstdint>

namespace dw::top_rows {

// A token as one integer: its logit in an order of unsigned integers, then its id, smaller ids greater. No two are
// equal, so ties need no care.
using token_key = unsigned long long;

// Integers in the order of logits. Both zeros are equal; 0: a NaN, under all numbers.
__device__ __forceinline__ uint32_t order_of(float logit) {
    const uint32_t bits      = __float_as_uint(logit);
    const uint32_t magnitude = bits << 1;
    const uint32_t flipped   = bits ^ ((uint32_t) ((int32_t) bits >> 31) | 0x80000000);
    return magnitude > 0xff000000 ? 0 : magnitude == 0 ? 0x80000000 : flipped;
}

// the greater one's order
__device__ __forceinline__ uint32_t greater_order(float a, float b) {
    // as signed integers: a NaN is made the least one; -0 is -1, next to 0
    const auto ordered = [](float x) {
        const int bits = x == x ? __float_as_int(x) : -1;
        return bits ^ (bits >> 31 & 0x7fffffff);
    };
    const int greater = max(ordered(a), ordered(b));
    return greater == (int) 0x80000000 ? 0 : greater == -1 ? 0x80000000 : (uint32_t) greater ^ 0x80000000;
}

// NaN for a NaN
__device__ __forceinline__ float logit_of(uint32_t order) {
    return __uint_as_float(order ^ (~(uint32_t) ((int32_t) order >> 31) | 0x80000000));
}

// the logit of the greatest order of some; -inf: none is a number
__device__ __forceinline__ float max_of(uint32_t order) {
    return order ? logit_of(order) : -INFINITY;
}

__device__ __forceinline__ token_key key_of(uint32_t order, uint32_t id) {
    return (token_key) order << 32 | ~id;
}

__device__ __forceinline__ uint32_t id_of(token_key key) {
    return ~(uint32_t) key;
}

__device__ __forceinline__ uint32_t order_in(token_key key) {
    return (uint32_t) (key >> 32);
}

// x - max; of equal infinities, too
__device__ __forceinline__ float below(float x, float max) {
    return x == max ? 0.0f : x - max;
}

// The sum of exponentials of those that are numbers, under the greatest. If that is infinite, 0 takes its place: a
// difference of infinities would be NaN.
template <int n> __device__ __forceinline__ float sum_under(float max, const float (&values)[n]) {
    const float taken = isinf(max) ? 0.0f : max;
    float       sum   = 0.0f;
#pragma unroll
    for (int i = 0; i < n; ++i) {
        sum += values[i] == values[i] ? expf(values[i] - taken) : 0.0f;
    }
    return sum;
}

// The same address, which the compiler knows nothing of: else it makes it anew for each load that has a condition, or
// holds such addresses in registers from pass to pass.
template <typename T> __device__ __forceinline__ T * kept(T * at) {
    asm volatile("" : "+l"(at));
    return at;
}

// ---- over the lanes of a warp; each gets it ----

__device__ __forceinline__ uint32_t min_of_lanes(uint32_t x) {
    return ~max_of_lanes(~x);
}

template <typename number_type> __device__ __forceinline__ number_type sum_of_lanes(number_type x) {
    for (int offset = 16; offset > 0; offset /= 2) {
        x += __shfl_xor_sync(0xffffffff, x, offset);
    }
    return x;
}

} // namespace dw::top_rows
