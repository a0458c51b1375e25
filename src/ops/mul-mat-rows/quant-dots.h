// A tile of quantised weights times rows of activations. The chain of floats of a result goes over the super-blocks, or
// blocks, in their order, one fused multiply-add each (two where a type has minima): the same whatever else is computed
// beside it. All sums within a block are integers.
// Test: tests/ops/test_quant_rows.py.

#pragma once

#include "ops/mul-mat-rows/fused.h"
#include "ops/mul-mat-rows/quant-tile.h"

#ifdef DW_QUANT_LANES

#include "ops/mul-mat-rows/quant-blocks.h"

namespace dw::DW_QUANT_NAMESPACE {

#ifndef DW_DOT4
// The sum so far is computed here. Else gcc adds eight products as a tree, which takes more registers than AVX2 has:
// Q4_K takes 1.4 times as long. Blocks of 32, with fewer sums, are faster without (bench/LOG.md).
template <bool has_factor> inline void in_order(vi & sum) {
    if constexpr (has_factor && lanes == 8) {
        asm("" : "+x"(sum));
    }
}
#endif

// sums[c] += factor * (weights . x[c]) over `steps` dwords from w on; x[c] points at the first of its bytes.
// has_factor: else 1, and x is what blocks of 32 have. n_safe: see quant-tile.h.
template <int C, int steps, bool has_factor, bool is_signed, int n_safe>
inline void add_products(const vi * w, const char * const * x, int at, const vi & factor, vi * sums) {
#ifdef DW_DOT4
    vi part[C];
    for (int c = 0; c < C; ++c) {
        part[c] = has_factor ? vi{} : sums[c];
    }
    for (int i = 0; i < steps; ++i) {
        for (int c = 0; c < C; ++c) {
            const vi y = broadcast(x[c] + at + 4 * i);
            part[c]    = has_factor ? dot4(part[c], w[i], y) : dot4(part[c], y, w[i]);
        }
    }
    for (int c = 0; c < C; ++c) {
        sums[c] = has_factor ? sums[c] + part[c] * factor : part[c];
    }
#else
    const vi ones = all(0x00010001);
    for (int first = 0; first < steps; first += n_safe) {
        vi part[C];
        for (int i = first; i < first + n_safe; ++i) {
            const vi a = is_signed ? magnitude(w[i]) : w[i];
            for (int c = 0; c < C; ++c) {
                const vi y = broadcast(x[c] + at + 4 * i);
                const vi p = products16(a, is_signed ? with_sign(y, w[i]) : y);
                part[c]    = i == first ? p : add16(part[c], p);
                in_order<has_factor>(part[c]);
            }
        }
        for (int c = 0; c < C; ++c) {
            sums[c] = dot2(sums[c], part[c], has_factor ? factor : ones);
        }
    }
#endif
}

// acc[c] += weights . x[c], a super-block of each
template <typename type, int C> void super_block_dots(const quant_tile & t, const char * const * x, vf * acc) {
    const char * q[C];
    vi           sums[C], minima[C];
    for (int c = 0; c < C; ++c) {
        q[c]    = x[c] + offsetof(block_q8_K, qs);
        sums[c] = minima[c] = vi{};
    }
    constexpr int steps = type::sub / 4;
    for (int s = 0; s < 256 / type::sub; ++s) {
        add_products<C, steps, true, type::is_signed, type::n_safe>(t.w + s * steps, q, s * type::sub, t.scale[s],
                                                                    sums);
    }
    if constexpr (type::has_minima || type::has_offset) {
        for (int p = 0; p < 8; ++p) {
            for (int c = 0; c < C; ++c) {
                vi & to = type::has_minima ? minima[c] : sums[c];
                to      = dot2(to, t.pairs[p], broadcast(x[c] + offsetof(block_q8_K, bsums) + 4 * p));
            }
        }
    }
    for (int c = 0; c < C; ++c) {
        float d;
        std::memcpy(&d, x[c] + offsetof(block_q8_K, d), sizeof(d));
        acc[c] = fused(to_float(sums[c]), t.d[0] * d, acc[c]);
        if constexpr (type::has_minima) {
            acc[c] = fused(to_float(minima[c]), t.minus_min * d, acc[c]);
        }
    }
}

// acc[c] += weights . x[c], n_blocks blocks of 32 of each
template <typename type, int C> void block_dots(const quant_tile & t, int n_blocks, const char * const * x, vf * acc) {
    for (int b = 0; b < n_blocks; ++b) {
        vi sums[C];
        for (int c = 0; c < C; ++c) {
            sums[c] = t.bias[b];
        }
        const int at = b * (int) sizeof(block_q8_0);
        add_products<C, 8, false, true, type::n_safe>(t.w + 8 * b, x, at + (int) offsetof(block_q8_0, qs), vi{}, sums);
        for (int c = 0; c < C; ++c) {
            acc[c] = fused(to_float(sums[c]), t.d[b] * half(x[c] + at), acc[c]);
        }
    }
}

} // namespace dw::DW_QUANT_NAMESPACE

#endif // DW_QUANT_LANES
