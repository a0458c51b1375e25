// Stands in for src/ops/door/ptx.cuh, which has the contracts.

#pragma once

#include "common.cuh"

#include <atomic>

namespace dw::ptx {

inline uint32_t and_xor(uint32_t x, uint32_t mask, uint32_t bits) {
    return (x & mask) ^ bits;
}

inline uint32_t highest_bits(uint32_t x) {
    return (x >> 7 & 0x01010101) * 0xff;
}

inline void prefetch_l2(const void *) {}

using shared_address = char *;

inline shared_address address_of(void * shared) {
    return (char *) shared;
}

template <bool> void copy_16(shared_address shared, const void * from) {
    if ((uintptr_t) shared % 16 != 0 || (uintptr_t) from % 16 != 0) {
        cuda_on_cpu::fail("a copy of 16 bytes between addresses that are no multiples of 16");
    }
    cuda_on_cpu::copy(shared, from, 16);
}

inline void meet(int number, int n_threads) {
    cuda_on_cpu::meet(number, n_threads);
}

inline void end_of_copies() {
    cuda_on_cpu::end_of_copies();
}

template <int n_open> void wait_for_copies() {
    cuda_on_cpu::wait_for_copies(n_open);
}

using arrivals = cuda_on_cpu::arrivals;

inline void begin_arrivals(arrivals * at, int n_copies = 1) {
    *at = { n_copies, 0, 0 };
}

template <bool once> void copy_span(void * shared, const void * from, int n_bytes, arrivals * at) {
    if ((uintptr_t) shared % 16 != 0 || (uintptr_t) from % 16 != 0 || n_bytes % 16 != 0) {
        cuda_on_cpu::fail("a copy of a span whose addresses and length are no multiples of 16");
    }
    cuda_on_cpu::copy(shared, from, n_bytes, at);
}

inline void wait_for_span(arrivals * at, int turn) {
    cuda_on_cpu::wait_for_turn(at, turn);
}

inline void let_spans_see() {}

// Kernels run one after another: what is not there now will not come while this one runs.
inline uint64_t nanoseconds() {
    static std::atomic<uint64_t> now;
    return now += 1'000'000;
}

// What the lanes of a warp give to one product of matrices, n_words of `a` and of `b` each.
template <int n_words> struct fragments {
    uint32_t a[2 * n_words], b[n_words];
};

// d += a b: 16 rows of a, 16 n_words values each, times 8 columns of b. A register has four values in a row. Lane l has
// rows l / 4 and l / 4 + 8 of a, column l / 4 of b, values 4 (l % 4) + 16 i on for register i of them; and of d columns
// 2 (l % 4) and the next, of rows l / 4 and l / 4 + 8.
template <int n_words, bool is_signed> void multiply(int (&d)[4], const fragments<n_words> & mine) {
    const fragments<n_words> * lanes = cuda_on_cpu::of_lanes(mine);
    const int                  lane  = cuda_on_cpu::lane();
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int word = 0; word < n_words; ++word) {
            for (int from = 0; from < 4; ++from) {
                const uint32_t a = lanes[row % 8 * 4 + from].a[2 * word + row / 8];
                const uint32_t b = lanes[4 * column + from].b[word];
                for (int shift = 0; shift < 32; shift += 8) {
                    d[i] += (is_signed ? (int) (int8_t) (a >> shift) : (int) (a >> shift & 0xff)) * (int8_t) (b >> shift);
                }
            }
        }
    }
}

template <bool is_signed> void multiply_8_bits(int (&d)[4], const uint32_t (&a)[4], uint2 b) {
    multiply<2, is_signed>(d, { { a[0], a[1], a[2], a[3] }, { b.x, b.y } });
}

inline void multiply_8_bits(int (&d)[4], uint2 a, uint32_t b) {
    multiply<1, true>(d, { { a.x, a.y }, { b } });
}

struct fragments_16_bits {
    uint32_t a[4], b[2];
};

// A register has two values in a row. Lane l has values 2 (l % 4) and the next of a, and 8 behind them, in rows l / 4
// and l / 4 + 8; the same values of column l / 4 of b; d as above.
inline void multiply_16_bits(float (&d)[4], const uint32_t (&a)[4], uint2 b) {
    const fragments_16_bits   mine{ { a[0], a[1], a[2], a[3] }, { b.x, b.y } };
    const fragments_16_bits * lanes = cuda_on_cpu::of_lanes(mine);
    const int                 lane  = cuda_on_cpu::lane();
    const auto                value = [](uint32_t word, int k) {
        return __half2float(__ushort_as_half((unsigned short) (word >> 16 * (k % 2))));
    };
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            const int from = k % 8 / 2, of_high = k / 8;
            d[i] += value(lanes[row % 8 * 4 + from].a[row / 8 + 2 * of_high], k) *
                    value(lanes[4 * column + from].b[of_high], k);
        }
    }
}

inline bool has_products() {
    return true;
}

inline bool has_spans() {
    return true;
}

} // namespace dw::ptx
