// A tile of quantised weights, unpacked: `lanes` rows and up to 256 values of each. Unpacked once, it meets every row
// of activations (quant-dots.h). Layouts of blocks: ggml-common.h. Test: tests/ops/test_quant_rows.py (float64 oracle
// of every type).

#pragma once

#include "ops/mul-mat-rows/quant-simd.h"

#ifdef DW_QUANT_LANES

#include "ggml.h"

namespace dw::DW_QUANT_NAMESPACE {

struct quant_tile {
    vi w[64];     // quants: lane r of w[k] holds values 4 k to 4 k + 3 of row r
    vi scale[16]; // types with super-blocks: of a sub-block; both halves of a lane where products are 16 bits wide
    vi pairs[8];  // types with super-blocks: factors of the activations' sums, two sub-blocks of 16 in a lane
    vi bias[8];   // types with blocks of 32: what a block's sum starts with
    vf d[8];      // of a super-block, or of each block
    vf minus_min; // of a super-block: what the sums with `pairs` count for, where the type has minima
};

constexpr int32_t offset_128 = (int32_t) 0x80808080; // in each byte

inline vi both_halves(const vi & low, const vi & high) {
    return (low & 0xffff) | (high << 16);
}

inline vi scale_for_dots(const vi & scale) {
#ifdef DW_DOT4
    return scale;
#else
    return both_halves(scale, scale);
#endif
}

inline vf halves_at(const row_bytes & rows) {
    const auto bits = [&](int r) {
        int16_t half;
        std::memcpy(&half, rows[r], sizeof(half));
        return half;
    };
    short v __attribute__((vector_size(lanes * 2)));
    for (int r = 0; r < lanes; ++r) {
        v[r] = bits(r);
    }
#if DW_QUANT_LANES == 16
    return (vf) _mm512_cvtph_ps((__m256i) v);
#elif DW_QUANT_LANES == 8
    return (vf) _mm256_cvtph_ps((__m128i) v);
#else
    return (vf) vcvt_f32_f16((float16x4_t) v);
#endif
}

// w[i] and w[4 + i] = value() of the low and of the high nibbles of dword i of 16 bytes, with the place of its first
// bit among 32
template <typename F> inline void unpack_32_nibbles(const row_bytes & rows, vi * w, F value) {
    vi packed[4];
    quad(rows, packed);
    for (int i = 0; i < 4; ++i) {
        w[i]     = value(low_nibbles(packed[i]), 4 * i);
        w[4 + i] = value(high_nibbles(packed[i]), 16 + 4 * i);
    }
}

constexpr int8_t iq4_values[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };

// --- super-blocks of 256. sub: values of a sub-block, each with its scale. n_safe: dwords whose products fit 16 bits.
// Activations: block_q8_K.

// Q4_K, and what Q5_K has in common
struct q4_k {
    static constexpr bool is_signed = false, has_minima = true, has_offset = false;
    static constexpr int  sub = 32, n_safe = 8, block_bytes = 144, d_at = 0;

    // F16 d and dmin, then 8 scales and 8 minima of 6 bits in 12 bytes: their upper 2 bits follow the lower 4 of the
    // last four of each
    static void unpack_scales(const row_bytes & rows, quant_tile & t) {
        vi head[4];
        quad(rows, head);
        t.d[0]        = halves(head[0]);
        t.minus_min   = -halves(shift_right(head[0], 16));
        const vi s[2] = { head[1] & 0x3f3f3f3f,
                          (head[3] & 0x0f0f0f0f) | ((shift_right(head[1], 6) & 0x03030303) << 4) };
        const vi m[2] = { head[2] & 0x3f3f3f3f,
                          (shift_right(head[3], 4) & 0x0f0f0f0f) | ((shift_right(head[2], 6) & 0x03030303) << 4) };
        for (int j = 0; j < 8; ++j) {
            t.scale[j]   = scale_for_dots(shift_right(s[j / 4], 8 * (j % 4)) & 0xff);
            const vi min = shift_right(m[j / 4], 8 * (j % 4)) & 0xff;
            t.pairs[j]   = both_halves(min, min); // activations have sums of 16, so two to a minimum
        }
    }

    // 32 bytes: low nibbles are 32 values, high ones the next 32
    static void unpack_nibbles(const row_bytes & rows, quant_tile & t) {
        for (int j = 0; j < 8; ++j) {
            vi packed[4];
            quad(rows.from(16 * j), packed);
            for (int i = 0; i < 4; ++i) {
                const int k = 16 * (j / 2) + 4 * (j % 2) + i;
                t.w[k]      = low_nibbles(packed[i]);
                t.w[k + 8]  = high_nibbles(packed[i]);
            }
        }
    }

    static void unpack(const row_bytes & rows, quant_tile & t) {
        unpack_scales(rows, t);
        unpack_nibbles(rows.from(16), t);
    }
};

struct q5_k {
    static constexpr bool is_signed = false, has_minima = true, has_offset = false;
    static constexpr int  sub = 32, n_safe = 4, block_bytes = 176;

    static void unpack(const row_bytes & rows, quant_tile & t) {
        q4_k::unpack_scales(rows, t);
        q4_k::unpack_nibbles(rows.from(48), t);
        vi high[8]; // bit s of byte i: the fifth bit of value i of sub-block s
        quad(rows.from(16), high);
        quad(rows.from(32), high + 4);
        for (int s = 0; s < 8; ++s) {
            for (int i = 0; i < 8; ++i) {
                t.w[8 * s + i] |= (shift_right(high[i], s) & 0x01010101) << 4;
            }
        }
    }
};

struct q6_k {
    static constexpr bool is_signed = false, has_minima = false, has_offset = true;
    static constexpr int  sub = 16, n_safe = 2, block_bytes = 210, d_at = 208;

    static void unpack(const row_bytes & rows, quant_tile & t) {
        for (int j = 0; j < 4; ++j) { // 16 bytes of upper bits, and the 2 x 16 bytes of lower ones that go with them
            vi a[4], b[4], high[4];
            quad(rows.from(64 * (j / 2) + 16 * (j % 2)), a);
            quad(rows.from(64 * (j / 2) + 16 * (j % 2) + 32), b);
            quad(rows.from(128 + 16 * j), high);
            vi * w = t.w + 32 * (j / 2) + 4 * (j % 2);
            for (int i = 0; i < 4; ++i) {
                w[i]      = low_nibbles(a[i]) | ((high[i] & 0x03030303) << 4);
                w[i + 8]  = low_nibbles(b[i]) | ((high[i] & 0x0c0c0c0c) << 2);
                w[i + 16] = high_nibbles(a[i]) | (high[i] & 0x30303030);
                w[i + 24] = high_nibbles(b[i]) | (shift_right(high[i], 2) & 0x30303030);
            }
        }
        vi scales[4];
        quad(rows.from(192), scales);
        for (int j = 0; j < 16; j += 2) {
            const vi s[2]  = { scales[j / 4] << (24 - 8 * (j % 4)) >> 24, scales[j / 4] << (16 - 8 * (j % 4)) >> 24 };
            t.scale[j]     = scale_for_dots(s[0]);
            t.scale[j + 1] = scale_for_dots(s[1]);
            t.pairs[j / 2] = both_halves(-32 * s[0], -32 * s[1]); // quants are 32 more than their values
        }
        t.d[0] = halves_at(rows.from(d_at));
    }
};

struct iq4_xs {
    static constexpr bool is_signed = !is_vnni, has_minima = false, has_offset = is_vnni;
    static constexpr int  sub = 32, n_safe = 1, block_bytes = 136;

    static void unpack(const row_bytes & rows, quant_tile & t) {
        vi head[4]; // F16 d, 8 x 2 upper bits of scales, 8 x 4 lower ones
        quad(rows, head);
        t.d[0] = halves(head[0]);
        for (int j = 0; j < 8; ++j) {
            const vi scale = ((shift_right(head[1], 4 * j) & 15) | ((shift_right(head[0], 16 + 2 * j) & 3) << 4)) - 32;
            t.scale[j]     = scale_for_dots(scale);
            t.pairs[j]     = both_halves(-128 * scale, -128 * scale);
            unpack_32_nibbles(rows.from(8 + 16 * j), t.w + 8 * j,
                              [](const vi & v, int) { return look_up(iq4_values, v) ^ (is_vnni ? offset_128 : 0); });
        }
    }
};

// --- blocks of 32, up to 8 in a tile. Activations: block_q8_0, with VNNI each quant 128 more than its value.

inline void add_bias(quant_tile & t, int block) {
#ifdef DW_VNNI
    vi sum{};
    for (int i = 0; i < 8; ++i) {
        sum = dot4(sum, all(offset_128), t.w[8 * block + i]);
    }
    t.bias[block] = -sum;
#else
    t.bias[block] = vi{};
#endif
}

struct q8_0 {
    static constexpr int n_safe = 1, block_bytes = 34;

    static void unpack(const row_bytes & rows, quant_tile & t, int block) {
        quad(rows.from(2), t.w + 8 * block);
        quad(rows.from(18), t.w + 8 * block + 4);
    }
};

struct q4_0 {
    static constexpr int n_safe = 8, block_bytes = 18;

    static void unpack(const row_bytes & rows, quant_tile & t, int block) {
        unpack_32_nibbles(rows.from(2), t.w + 8 * block, [](const vi & v, int) { return (vi) ((vb) v - 8); });
    }
};

struct iq4_nl {
    static constexpr int n_safe = 1, block_bytes = 18;

    static void unpack(const row_bytes & rows, quant_tile & t, int block) {
        unpack_32_nibbles(rows.from(2), t.w + 8 * block, [](const vi & v, int) { return look_up(iq4_values, v); });
    }
};

struct q5_0 {
    static constexpr int n_safe = 4, block_bytes = 22;

    // four bits as bit 4 of a byte each
    static vi fifth_bits(const vi & four) { return ((four * 0x00204081) & 0x01010101) << 4; }

    static void unpack(const row_bytes & rows, quant_tile & t, int block) {
        vi high{};
        for (int r = 0; r < lanes; ++r) {
            int32_t bits;
            std::memcpy(&bits, rows[r] + 2, sizeof(bits));
            high[r] = bits;
        }
        unpack_32_nibbles(rows.from(6), t.w + 8 * block, [&](const vi & v, int first) {
            return (vi) ((vb) (v | fifth_bits(shift_right(high, first) & 15)) - 16);
        });
    }
};

} // namespace dw::DW_QUANT_NAMESPACE

#endif // DW_QUANT_LANES
