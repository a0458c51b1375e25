// Stands in for CUDA's header of this name.

#pragma once

#include "cuda_runtime.h"

#include <cstring>

using half = _Float16;
struct alignas(4) half2 {
    half x, y;
};

inline float  __half2float(half x) { return (float) x; }
inline half   __float2half(float x) { return (half) x; }
inline float2 __half22float2(half2 v) { return { (float) v.x, (float) v.y }; }
inline half2  __floats2half2_rn(float x, float y) { return { (half) x, (half) y }; }
inline float  __low2float(half2 v) { return (float) v.x; }
inline float  __high2float(half2 v) { return (float) v.y; }

inline half2  __hsub2(half2 a, half2 b) { return { (half) (a.x - b.x), (half) (a.y - b.y) }; }
inline half2  __hmul2(half2 a, half2 b) { return { (half) (a.x * b.x), (half) (a.y * b.y) }; }

inline half __ushort_as_half(unsigned short bits) {
    half x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
}
