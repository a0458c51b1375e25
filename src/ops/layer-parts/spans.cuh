// Strips of weights that come into shared memory whole, by the engine that copies spans of memory: no warp spends
// instructions on them. Their rows lie one behind the other. Compute capability 9.0. Test:
// tests/ops/test_cuda_layers.py, tests/gpu/test_layer_parts_cuda.py.

#pragma once

#include "ops/layer-parts/pieces.cuh"

namespace dw::layer_parts {

// 16 rows as four spans of four rows with a gap behind each, so that lanes of one load meet different banks: row m of
// the tensor core is row m / 4 of span m % 4. Rows are of whole blocks of a type that is aligned.
struct strip_of_spans {
    static constexpr int n_spans = 4, rows_of_span = tile_rows / n_spans, gap = 32;

    static __host__ __device__ constexpr int span_bytes(int row_bytes) { return rows_of_span * row_bytes + gap; }
    static __host__ __device__ constexpr int bytes(int row_bytes) { return n_spans * span_bytes(row_bytes); }

    // where row m of the tensor core lies, and which row of the strip it is
    static __device__ __forceinline__ int place(int m, int row_bytes) {
        return m % n_spans * span_bytes(row_bytes) + m / n_spans * row_bytes;
    }
    static __device__ __forceinline__ int row_of(int m) { return m % n_spans * rows_of_span + m / n_spans; }

    // One lane: asks for a span. from: row 0 of the strip; arrived: of n_spans copies.
    static __device__ __forceinline__ void ask(char * strip, const char * from, int row_bytes, int span,
                                               ptx::arrivals * arrived) {
        ptx::copy_span</*once*/ true>(strip + span * span_bytes(row_bytes),
                                      from + (int64_t) span * rows_of_span * row_bytes, rows_of_span * row_bytes,
                                      arrived);
    }
};

// sums += a strip, when it has come, times columns: n_tiles tiles, first(t) being the first value of tile t. What is
// held of few columns is on its way before. A warp.
template <ggml_type type, int n_tiles, typename sums_type, typename first_type>
__device__ __forceinline__ void multiply_spans(sums_type & sums, const char * strip, int row_bytes, int lane,
                                               ptx::arrivals * arrived, first_type && first) {
    const char * a   = strip + strip_of_spans::place(lane / 4, row_bytes);
    const char * b   = strip + strip_of_spans::place(lane / 4 + 8, row_bytes);
    const auto   add = [&](int t, const typename sums_type::held & x) {
        const int at = tiled<type>::bytes(first(t));
        sums.template add<type>(a + at, b + at, x, first(t), blocks_of_tile);
    };
    if constexpr (sums_type::n_columns <= 2) {
        typename sums_type::held x[n_tiles];
#pragma unroll
        for (int t = 0; t < n_tiles; ++t) {
            x[t] = sums.template hold<type>(first(t), blocks_of_tile);
        }
        ptx::wait_for_span(arrived, 0);
#pragma unroll
        for (int t = 0; t < n_tiles; ++t) {
            add(t, x[t]);
        }
    } else {
        ptx::wait_for_span(arrived, 0);
#pragma unroll 1
        for (int t = 0; t < n_tiles; ++t) {
            add(t, {});
        }
    }
}

template <typename sums_type> __device__ __forceinline__ void store_sums_of_spans(float * to, const sums_type & sums) {
    sums.each([&](int column, int m, float sum) { to[place_of_sum(column, strip_of_spans::row_of(m))] = sum; });
}

// Host: whether strips of these weights may come whole.
inline bool lies_in_spans(ggml_type type, int64_t width, int64_t row_stride) {
    return type == GGML_TYPE_Q4_K && ptx::has_spans() && row_stride == (int64_t) ggml_row_size(type, width);
}

} // namespace dw::layer_parts
