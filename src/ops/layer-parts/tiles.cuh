// Tiles of quantised weights, 16 rows of 256 values, times up to 8 or 16 columns of activations on integer tensor cores
// (mma.m16n8k32, m16n8k16; compute capability 8.0 and up). Blocks of weights are copied into shared memory as ggml
// stores them, and unpacked into registers.
//
// A warp multiplies tiles. Lane l has rows l/4 and l/4 + 8 of a tile, column l/4 as an operand, and the sums of these
// rows with columns 2(l%4) and 2(l%4) + 1. Dots of sub-blocks are exact integers, and are scaled and added in ascending
// order: the bits of a column depend neither on its place nor on its neighbours.
// Test: tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/rows.cuh"
#include "vecdotq.cuh"

#include <algorithm>

namespace dw::layer_parts {

constexpr int tile_rows = 16, tile_values = 256, tile_columns = 8;

// The columns that this lane reads, from their first value on.
template <int n_wide> struct lane_columns {
    const int8_t *       quants[n_wide];             // of column lane / 4
    const scale_and_sum *even[n_wide], *odd[n_wide]; // of columns 2 (lane % 4) and the next

    // row_of(c): the row of x that is column c
    template <typename row_type>
    __device__ __forceinline__ lane_columns(const activations & x, int lane, row_type && row_of) {
#pragma unroll
        for (int w = 0; w < n_wide; ++w) {
            const int c = tile_columns * w;
            quants[w]   = x.quants + (int64_t) row_of(c + lane / 4) * x.width;
            even[w]     = x.scales + (int64_t) row_of(c + lane % 4 * 2) * (x.width / 32);
            odd[w]      = x.scales + (int64_t) row_of(c + lane % 4 * 2 + 1) * (x.width / 32);
        }
    }
};

// By columns in groups of 8: rows lane / 4 (columns even, odd), lane / 4 + 8 (even, odd).
template <int n_wide> using lane_sums = float[n_wide][4];

// Four words of A of a step of 32 values: rows r, r + 8, and r, r + 8 of its second half.
struct words_of_a {
    uint32_t at[4];
};

template <bool is_signed> __device__ __forceinline__ void multiply_32(int (&d)[4], const words_of_a & a, uint2 b) {
#if __CUDA_ARCH__ >= 800
    if constexpr (is_signed) {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a.at[0]), "r"(a.at[1]), "r"(a.at[2]), "r"(a.at[3]), "r"(b.x), "r"(b.y), "r"(0));
    } else {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a.at[0]), "r"(a.at[1]), "r"(a.at[2]), "r"(a.at[3]), "r"(b.x), "r"(b.y), "r"(0));
    }
#else
    NO_DEVICE_CODE;
#endif
}

__device__ __forceinline__ void multiply_16(int (&d)[4], uint32_t a, uint32_t a8, uint32_t b) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a), "r"(a8), "r"(b), "r"(0));
#else
    NO_DEVICE_CODE;
#endif
}

// sums += scales of the rows times scales of the columns times the dots d
__device__ __forceinline__ void add_scaled(float (&sums)[4], const int (&d)[4], float scale, float scale8, float even,
                                           float odd) {
    sums[0] = fmaf(scale * even, (float) d[0], sums[0]);
    sums[1] = fmaf(scale * odd, (float) d[1], sums[1]);
    sums[2] = fmaf(scale8 * even, (float) d[2], sums[2]);
    sums[3] = fmaf(scale8 * odd, (float) d[3], sums[3]);
}

// sums -= least values of the rows times what the columns sum up to
__device__ __forceinline__ void take_least(float (&sums)[4], float least, float least8, float even, float odd) {
    sums[0] = fmaf(-least, even, sums[0]);
    sums[1] = fmaf(-least, odd, sums[1]);
    sums[2] = fmaf(-least8, even, sums[2]);
    sums[3] = fmaf(-least8, odd, sums[3]);
}

// four bytes from an address that is a multiple of 2
__device__ __forceinline__ uint32_t word_at(const char * at, bool is_odd) {
    const uint32_t * low = (const uint32_t *) (at - (is_odd ? 2 : 0));
    return is_odd ? __byte_perm(low[0], low[1], 0x5432) : low[0];
}

__device__ __forceinline__ bool is_odd(const char * at) {
    return (uintptr_t) at % 4 != 0;
}

// byte i of w times d, exact; less = -d * 2^23
__device__ __forceinline__ float times_byte(uint32_t w, int i, float d, float less) {
    return fmaf(d, __uint_as_float(__byte_perm(w, 0x4B000000, 0x7650 + i)), less);
}

// Scales and least values of a block of Q4_K or Q5_K.
struct scales_of_K {
    uint32_t scales[2], leasts[2];
    float    d, d_less, least, least_less;

    __device__ __forceinline__ explicit scales_of_K(const char * block) {
        const uint4  head = *(const uint4 *) block;
        const float2 of   = __half22float2(*(const half2 *) &head.x);
        scales[0]         = head.y & 0x3f3f3f3f;
        scales[1]         = (head.w & 0x0f0f0f0f) | (head.y >> 2 & 0x30303030);
        leasts[0]         = head.z & 0x3f3f3f3f;
        leasts[1]         = (head.w >> 4 & 0x0f0f0f0f) | (head.z >> 2 & 0x30303030);
        d                 = of.x;
        d_less            = of.x * -8388608.0f;
        least             = of.y;
        least_less        = of.y * -8388608.0f;
    }
    __device__ __forceinline__ float scale(int i) const { return times_byte(scales[i / 4], i % 4, d, d_less); }
    __device__ __forceinline__ float least_value(int i) const {
        return times_byte(leasts[i / 4], i % 4, least, least_less);
    }
};

// How a type is tiled:
//   bytes      of 256 values of a row
//   n_at_once  tiles that are copied together: 256 to 512 values, whose rows lie `pitch` bytes apart
//   add        sums += tile times columns; a, b: rows lane / 4 and lane / 4 + 8; columns from the tile's value `first`
//              on, of which n_steps blocks of 32 count
// Copies begin at multiples of 16 bytes: is_aligned says that a row's blocks do, too. A pitch lets the lanes of one
// load meet different banks.
template <ggml_type type> struct tiled;

template <> struct tiled<GGML_TYPE_Q4_K> {
    static constexpr int  bytes = sizeof(block_q4_K), n_at_once = 2, pitch = 2 * bytes;
    static constexpr bool is_aligned = true;

    template <int n_wide>
    static __device__ __forceinline__ void add(lane_sums<n_wide> & sums, const char * a, const char * b,
                                               const lane_columns<n_wide> & columns, int first, int, int lane) {
        const scales_of_K of_a(a), of_b(b);
        const int         t = 8 * (lane % 4);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint2      x = *(const uint2 *) (a + 16 + 32 * j + t), y = *(const uint2 *) (b + 16 + 32 * j + t);
            const uint32_t   low_bits = 0x0f0f0f0f;
            const words_of_a low      = { { x.x & low_bits, y.x & low_bits, x.y & low_bits, y.y & low_bits } };
            const words_of_a high     = { { x.x & ~low_bits, y.x & ~low_bits, x.y & ~low_bits, y.y & ~low_bits } };
            const float      s0 = of_a.scale(2 * j), s1 = of_b.scale(2 * j); // the high nibbles count 16 times
            const float      h0 = of_a.scale(2 * j + 1) * 0.0625f, h1 = of_b.scale(2 * j + 1) * 0.0625f;
            const float      m0 = of_a.least_value(2 * j), m1 = of_b.least_value(2 * j);
            const float      n0 = of_a.least_value(2 * j + 1), n1 = of_b.least_value(2 * j + 1);
            const int        at = first + 64 * j;
#pragma unroll
            for (int c = 0; c < n_wide; ++c) {
                const float4 even = *(const float4 *) (columns.even[c] + at / 32);
                const float4 odd  = *(const float4 *) (columns.odd[c] + at / 32);
                int          d[4];
                multiply_32<false>(d, low, *(const uint2 *) (columns.quants[c] + at + t));
                add_scaled(sums[c], d, s0, s1, even.x, odd.x);
                take_least(sums[c], m0, m1, even.y, odd.y);
                multiply_32<false>(d, high, *(const uint2 *) (columns.quants[c] + at + 32 + t));
                add_scaled(sums[c], d, h0, h1, even.z, odd.z);
                take_least(sums[c], n0, n1, even.w, odd.w);
            }
        }
    }
};

template <> struct tiled<GGML_TYPE_Q5_K> {
    static constexpr int  bytes = sizeof(block_q5_K), n_at_once = 2, pitch = 2 * bytes;
    static constexpr bool is_aligned = true;

    template <int n_wide>
    static __device__ __forceinline__ void add(lane_sums<n_wide> & sums, const char * a, const char * b,
                                               const lane_columns<n_wide> & columns, int first, int, int lane) {
        const scales_of_K of_a(a), of_b(b);
        const int         t       = 8 * (lane % 4);
        const uint2       fifth_a = *(const uint2 *) (a + 16 + t), fifth_b = *(const uint2 *) (b + 16 + t);
        const auto        word = [](uint32_t four, uint32_t fifth, int shift, int bit) {
            return (four >> shift & 0x0f0f0f0f) | ((fifth >> bit & 0x01010101) << 4);
        };
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint2 x          = *(const uint2 *) (a + 48 + 32 * (i / 2) + t),
                        y          = *(const uint2 *) (b + 48 + 32 * (i / 2) + t);
            const int        shift = i % 2 * 4, at = first + 32 * i;
            const words_of_a w  = { { word(x.x, fifth_a.x, shift, i), word(y.x, fifth_b.x, shift, i),
                                      word(x.y, fifth_a.y, shift, i), word(y.y, fifth_b.y, shift, i) } };
            const float      s0 = of_a.scale(i), s1 = of_b.scale(i), m0 = of_a.least_value(i), m1 = of_b.least_value(i);
#pragma unroll
            for (int c = 0; c < n_wide; ++c) {
                const float2 even = columns.even[c][at / 32], odd = columns.odd[c][at / 32];
                int          d[4];
                multiply_32<false>(d, w, *(const uint2 *) (columns.quants[c] + at + t));
                add_scaled(sums[c], d, s0, s1, even.x, odd.x);
                take_least(sums[c], m0, m1, even.y, odd.y);
            }
        }
    }
};

template <> struct tiled<GGML_TYPE_IQ4_XS> {
    static constexpr int  bytes = sizeof(block_iq4_xs), n_at_once = 2, pitch = 2 * bytes + 32;
    static constexpr bool is_aligned = false;

    static __device__ __forceinline__ float scale(const char * block, int i) {
        const uint2 head = *(const uint2 *) block; // d, high bits of scales; low bits
        const int   low = head.y >> (4 * i) & 0x0f, high = head.x >> (16 + 2 * i) & 0x03;
        return __half2float(__ushort_as_half((unsigned short) head.x)) * (float) ((low | high << 4) - 32);
    }

    template <int n_wide>
    static __device__ __forceinline__ void add(lane_sums<n_wide> & sums, const char * a, const char * b,
                                               const lane_columns<n_wide> & columns, int first, int, int lane) {
        const int t = 4 * (lane % 4);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int2       x  = get_int_from_table_16(*(const int *) (a + 8 + 16 * i + t), kvalues_iq4nl);
            const int2       y  = get_int_from_table_16(*(const int *) (b + 8 + 16 * i + t), kvalues_iq4nl);
            const words_of_a w  = { { (uint32_t) x.x, (uint32_t) y.x, (uint32_t) x.y, (uint32_t) y.y } };
            const float      s0 = scale(a, i), s1 = scale(b, i);
            const int        at = first + 32 * i;
#pragma unroll
            for (int c = 0; c < n_wide; ++c) {
                const int8_t * q = columns.quants[c] + at + t;
                int            d[4];
                multiply_32<true>(d, w, make_uint2(*(const uint32_t *) q, *(const uint32_t *) (q + 16)));
                add_scaled(sums[c], d, s0, s1, columns.even[c][at / 32].x, columns.odd[c][at / 32].x);
            }
        }
    }
};

template <> struct tiled<GGML_TYPE_Q8_0> {
    static constexpr int  bytes = 8 * sizeof(block_q8_0), n_at_once = 1, pitch = bytes + 32;
    static constexpr bool is_aligned = false;

    template <int n_wide>
    static __device__ __forceinline__ void add(lane_sums<n_wide> & sums, const char * a, const char * b,
                                               const lane_columns<n_wide> & columns, int first, int n_steps, int lane) {
        const int t = 4 * (lane % 4);
#pragma unroll 2
        for (int i = 0; i < n_steps; ++i) {
            const char *     x = a + i * sizeof(block_q8_0), *y = b + i * sizeof(block_q8_0);
            const bool       odd_x = is_odd(x + 2), odd_y = is_odd(y + 2);
            const words_of_a w  = { { word_at(x + 2 + t, odd_x), word_at(y + 2 + t, odd_y), word_at(x + 18 + t, odd_x),
                                      word_at(y + 18 + t, odd_y) } };
            const float      s0 = __half2float(*(const half *) x), s1 = __half2float(*(const half *) y);
            const int        at = first + 32 * i;
#pragma unroll
            for (int c = 0; c < n_wide; ++c) {
                const int8_t * q = columns.quants[c] + at + t;
                int            d[4];
                multiply_32<true>(d, w, make_uint2(*(const uint32_t *) q, *(const uint32_t *) (q + 16)));
                add_scaled(sums[c], d, s0, s1, columns.even[c][at / 32].x, columns.odd[c][at / 32].x);
            }
        }
    }
};

template <> struct tiled<GGML_TYPE_Q6_K> {
    static constexpr int  bytes = sizeof(block_q6_K), n_at_once = 1, pitch = 240;
    static constexpr bool is_aligned = false;

    // Word `i` of four, 32 values apart, of words of low and high bits: 4 times the values less 32.
    static __device__ __forceinline__ uint32_t word(uint32_t low, uint32_t next, uint32_t high, int i) {
        const uint32_t four = i % 2 ? next : low;
        const uint32_t bits = (i < 2 ? four << 2 : four >> 2) & 0x3c3c3c3c;
        return (bits | (high << (6 - 2 * i) & 0xc0c0c0c0)) ^ 0x80808080;
    }

    template <int n_wide>
    static __device__ __forceinline__ void add(lane_sums<n_wide> & sums, const char * a, const char * b,
                                               const lane_columns<n_wide> & columns, int first, int, int lane) {
        const int   t     = 4 * (lane % 4);
        const bool  odd_a = is_odd(a), odd_b = is_odd(b);
        const float d_a = 0.25f * __half2float(*(const half *) (a + 208));
        const float d_b = 0.25f * __half2float(*(const half *) (b + 208));
#pragma unroll
        for (int part = 0; part < 4; ++part) { // 16 values of each of four blocks of 32
            const int      side = part / 2, half_block = part % 2, word_in = 16 * half_block + t;
            const uint32_t low_a  = word_at(a + 64 * side + word_in, odd_a),
                           low_b  = word_at(b + 64 * side + word_in, odd_b);
            const uint32_t next_a = word_at(a + 64 * side + 32 + word_in, odd_a),
                           next_b = word_at(b + 64 * side + 32 + word_in, odd_b);
            const uint32_t high_a = word_at(a + 128 + 32 * side + word_in, odd_a),
                           high_b = word_at(b + 128 + 32 * side + word_in, odd_b);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int      scale_at = 192 + 8 * side + 2 * i + half_block, at = first + 128 * side + 32 * i;
                const float    s0 = d_a * (float) *(const int8_t *) (a + scale_at);
                const float    s1 = d_b * (float) *(const int8_t *) (b + scale_at);
                const uint32_t x = word(low_a, next_a, high_a, i), y = word(low_b, next_b, high_b, i);
#pragma unroll
                for (int c = 0; c < n_wide; ++c) {
                    int d[4];
                    multiply_16(d, x, y, *(const uint32_t *) (columns.quants[c] + at + word_in));
                    add_scaled(sums[c], d, s0, s1, columns.even[c][at / 32].x, columns.odd[c][at / 32].x);
                }
            }
        }
    }
};

// A piece of weights: up to tiled<type>::n_at_once tiles side by side.
struct piece {
    const char * from;     // row 0
    int64_t      stride;   // bytes
    int          last_row; // rows behind it are this one
    int          n_values; // of a row
};

template <ggml_type type> constexpr int slot_bytes   = tile_rows * tiled<type>::pitch;
template <ggml_type type> constexpr int piece_values = tiled<type>::n_at_once * tile_values;

__device__ __forceinline__ void copy_16(char * to, const char * from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"((uint32_t) __cvta_generic_to_shared(to)),
                 "l"(from)
                 : "memory");
#else
    NO_DEVICE_CODE;
#endif
}

template <ggml_type type> __device__ __forceinline__ int offset_in_slot(const char * row) {
    return tiled<type>::is_aligned ? 0 : (int) ((uintptr_t) row % 16);
}

// Copies a piece into a slot, without waiting. A warp.
template <ggml_type type> __device__ __forceinline__ void ask_for(char * slot, const piece & of, int lane) {
    constexpr int n = tiled<type>::pitch / 16, n_tail = n % 8; // loads of 16 bytes a row; 8 lanes of a row side by side
    const int     n_bytes = of.n_values / 32 * (tiled<type>::bytes / 8);
    const auto    ask     = [&](int row, int i) {
        const char * at    = of.from + min(row, of.last_row) * of.stride;
        const int    begin = offset_in_slot<type>(at);
        if (16 * i < begin + n_bytes) {
            copy_16(slot + row * tiled<type>::pitch + 16 * i, at - begin + 16 * i);
        }
    };
#pragma unroll
    for (int row = 0; row < tile_rows; row += 4) {
#pragma unroll
        for (int i = 0; i + 8 <= n; i += 8) {
            ask(row + lane / 8, i + lane % 8);
        }
    }
    if constexpr (n_tail > 0) {
#pragma unroll
        for (int i = 0; i < (tile_rows * n_tail + 31) / 32; ++i) {
            const int at = 32 * i + lane;
            if (at < tile_rows * n_tail) {
                ask(at / n_tail, n / 8 * 8 + at % n_tail);
            }
        }
    }
}

__device__ __forceinline__ void end_of_request() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// All requests of this warp but the last n_open have arrived.
template <int n_open> __device__ __forceinline__ void wait_for_requests() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(n_open) : "memory");
#endif
    __syncwarp();
}

// sums += a piece that has arrived in a slot, times columns from their value `first` on. A warp.
template <ggml_type type, int n_wide>
__device__ __forceinline__ void multiply_piece(lane_sums<n_wide> & sums, const char * slot, const piece & of,
                                               const lane_columns<n_wide> & columns, int first, int lane) {
    const int    row = lane / 4;
    const char * a   = slot + row * tiled<type>::pitch;
    const char * b   = a + 8 * tiled<type>::pitch;
    if constexpr (!tiled<type>::is_aligned) {
        a += offset_in_slot<type>(of.from + min(row, of.last_row) * of.stride);
        b += offset_in_slot<type>(of.from + min(row + 8, of.last_row) * of.stride);
    }
#pragma unroll 1
    for (int done = 0; done < of.n_values; done += tile_values) {
        tiled<type>::template add<n_wide>(sums, a, b, columns, first + done, min(8, (of.n_values - done) / 32), lane);
        a += tiled<type>::bytes;
        b += tiled<type>::bytes;
    }
}

// How a block multiplies tiles: the slots of its warps in shared memory, n_slots each.
struct tile_plan {
    int n_slots, slots_of_a_warp; // bytes
};

// Slots of a warp: while one piece is multiplied, the next arrives.
constexpr int most_slots = 2;

// Multiplies pieces 0 .. n - 1 of a warp, in turn. piece_of(i) describes one, multiply(i, piece, slot) takes it when it
// has arrived. between() is called when the first are on their way: there a kernel waits for what it depends on.
template <ggml_type type, typename piece_type, typename between_type, typename multiply_type>
__device__ __forceinline__ void for_each_piece(char * slots, int n_slots, int n, int lane, piece_type && piece_of,
                                               between_type && between, multiply_type && multiply) {
    for (int i = 0; i < min(n, n_slots); ++i) {
        ask_for<type>(slots + i * slot_bytes<type>, piece_of(i), lane);
        end_of_request();
    }
    between();
    for (int i = 0; i < n; ++i) {
        if (n_slots > 1 && i + 1 < n) {
            wait_for_requests<1>();
        } else {
            wait_for_requests<0>();
        }
        char * slot = slots + i % n_slots * slot_bytes<type>;
        multiply(i, piece_of(i), slot);
        if (i + n_slots < n) {
            __syncwarp(); // all lanes have read the slot
            ask_for<type>(slot, piece_of(i + n_slots), lane);
            end_of_request();
        }
    }
}

// Where a warp puts its sums: by column, rows side by side. The gaps let lanes meet different banks.
template <int n_wide> constexpr int floats_of_sums = 20 * tile_columns * n_wide;

__device__ __forceinline__ int place_of_sum(int column, int row) {
    return 20 * column + row;
}

template <int n_wide> __device__ __forceinline__ void store_sums(float * to, const lane_sums<n_wide> & sums, int lane) {
#pragma unroll
    for (int w = 0; w < n_wide; ++w) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            to[place_of_sum(tile_columns * w + lane % 4 * 2 + i % 2, lane / 4 + i / 2 * 8)] = sums[w][i];
        }
    }
}

// Host: bytes of a slot of a type, and values of a row that it holds; 0 bytes: the type is not tiled.
template <ggml_type type> constexpr int2 size_of_slot() {
    return { slot_bytes<type>, piece_values<type> };
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
            return { 0, 1 << 20 };
    }
}

inline int bytes_of_slot(ggml_type type) {
    return size_of_slot(type).x;
}

inline int values_of_slot(ggml_type type) {
    return size_of_slot(type).y;
}

// Dynamic shared memory that a block may have. A kernel has few variables in shared memory beside it.
inline size_t shared_memory_of_block() {
    constexpr size_t of_variables = 1024;
    return ggml_cuda_info().devices[ggml_cuda_get_device()].smpbo - of_variables;
}

// The number of slots, n_slots at most, that leave shared memory for `others`.
inline int slots_that_fit(int n_slots, size_t bytes_of_all, size_t others) {
    while (n_slots > 1 && n_slots * bytes_of_all + others > shared_memory_of_block()) {
        --n_slots;
    }
    return n_slots;
}

// Shared memory of a block that multiplies tiles: slots of its warps, then what else it needs.
struct tile_launch {
    tile_plan plan;
    size_t    bytes;

    // n_values: of a row, for one warp; others: bytes beside the slots
    tile_launch(const ggml_type * types, int n_types, int64_t n_values, int n_warps, size_t others) {
        int  most    = 0;
        bool is_long = false;
        for (int i = 0; i < n_types; ++i) {
            most    = std::max(most, bytes_of_slot(types[i]));
            is_long = is_long || values_of_slot(types[i]) < n_values;
        }
        plan.n_slots         = slots_that_fit(is_long ? most_slots : 1, (size_t) (most * n_warps), others);
        plan.slots_of_a_warp = plan.n_slots * most;
        bytes                = n_warps * plan.slots_of_a_warp + others;
    }
};

// Every device has the tensor cores that tiles need, and was compiled for.
inline bool has_tile_products() {
    const auto & info = ggml_cuda_info();
    for (int i = 0; i < info.device_count; ++i) {
        if (ggml_cuda_highest_compiled_arch(info.devices[i].cc) < GGML_CUDA_CC_AMPERE) {
            return false;
        }
    }
    return true;
}

} // namespace dw::layer_parts
