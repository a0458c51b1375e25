// Weights as they lie, for one or two rows of activations: Q4_K, and Q6_K with 8 lanes or with AVX-512 and VNNI.
// This takes fewer instructions than to unpack a tile. Integer sums are those of the tile, so the results are the same
// bits. Test: tests/ops/test_quant_rows.py.

#pragma once

#include "ops/mul-mat-rows/fused.h"
#include "ops/mul-mat-rows/prefetch.h"
#include "ops/mul-mat-rows/quant-blocks.h"
#include "ops/mul-mat-rows/quant-tile.h"

#ifdef DW_QUANT_LANES

#include <iterator>

namespace dw::DW_QUANT_NAMESPACE {

// rows of activations that a type's weights meet as they lie
template <typename type> constexpr int direct_cols = 0;

constexpr int direct_blocks = 8;    // super-blocks at a time
constexpr int ahead_bytes   = 8192; // from a row's block to what is prefetched meanwhile

// A super-block of a weight row, unpacked, and one of activations. times() leaves lanes whose sum is their product.
template <typename type> struct direct_row;
template <typename type> struct direct_column;

#ifdef __AVX2__
// of Q4_K, 16 bits each: 8 scales, then 8 minima
inline __m256i scales_and_minima(const char * packed) {
    uint32_t s[3];
    std::memcpy(s, packed, sizeof(s));
    return _mm256_cvtepu8_epi16(
        _mm_setr_epi32((int) (s[0] & 0x3f3f3f3f), (int) ((s[2] & 0x0f0f0f0f) | (s[0] >> 6 & 0x03030303) << 4),
                       (int) (s[1] & 0x3f3f3f3f), (int) ((s[2] >> 4 & 0x0f0f0f0f) | (s[1] >> 6 & 0x03030303) << 4)));
}
#endif

} // namespace dw::DW_QUANT_NAMESPACE

#if DW_QUANT_LANES == 16
#include "ops/mul-mat-rows/quant-direct-wide.h"
#elif DW_QUANT_LANES == 8
#include "ops/mul-mat-rows/quant-direct-narrow.h"
#endif

namespace dw::DW_QUANT_NAMESPACE {

// Row after row, as memory likes it: products of up to direct_blocks super-blocks before any sum over lanes.
template <typename type, int C> struct direct_products {
    vi products[C][direct_blocks][lanes];
    vi minima[type::has_minima ? C : 1][type::has_minima ? direct_blocks : 1][lanes];

    // F16 numbers of the weights: d, then the one of minima. Kept while their lines are in the first cache.
    uint16_t scales[type::has_minima ? 2 : 1][direct_blocks][lanes];

    row_bytes scales_of(int which, int b) const { return { (const char *) scales[which][b], sizeof(uint16_t) }; }

    direct_products(const row_bytes & rows, int n_blocks, const char * const * x) {
        direct_column<type> columns[C][direct_blocks];
        for (int c = 0; c < C; ++c) {
            for (int b = 0; b < n_blocks; ++b) {
                columns[c][b].load(x[c] + b * sizeof(block_q8_K));
            }
        }
        for (int r = 0; r < lanes; ++r) {
            for (int b = 0; b < n_blocks; ++b) {
                const char *           block = rows[r] + b * type::block_bytes;
                const direct_row<type> row(block);
                for (int i = 0; i < type::block_bytes; i += 64) {
                    prefetch_line(block + ahead_bytes + i);
                }
                for (size_t i = 0; i < std::size(scales); ++i) {
                    std::memcpy(&scales[i][b][r], block + type::d_at + i * sizeof(uint16_t), sizeof(uint16_t));
                }
                for (int c = 0; c < C; ++c) {
                    products[c][b][r] = times(row, columns[c][b]);
                    if constexpr (type::has_minima) {
                        minima[c][b][r] = minima_times(row, columns[c][b]);
                    }
                }
            }
        }
    }
};

// acc[c] += weights . x[c], up to direct_blocks super-blocks of each
template <typename type, int C>
void direct_dots(const row_bytes & rows, int n_blocks, const char * const * x, vf * acc) {
    const direct_products<type, C> found(rows, n_blocks, x);
    for (int b = 0; b < n_blocks; ++b) {
        const vf d   = halves_at(found.scales_of(0, b));
        const vf min = type::has_minima ? halves_at(found.scales_of(1, b)) : vf{};
        for (int c = 0; c < C; ++c) {
            float dx;
            std::memcpy(&dx, x[c] + b * sizeof(block_q8_K) + offsetof(block_q8_K, d), sizeof(dx));
            acc[c] = fused(to_float(sums_of_rows(found.products[c][b])), d * dx, acc[c]);
            if constexpr (type::has_minima) {
                acc[c] = fused(to_float(sums_of_rows(found.minima[c][b])), -min * dx, acc[c]);
            }
        }
    }
}

} // namespace dw::DW_QUANT_NAMESPACE

#endif // DW_QUANT_LANES
