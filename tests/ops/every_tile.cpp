// Every size of tile that mul-mat-rows.cpp has, called by itself, for tests/ops/test_contraction.py: compiled with the
// flags of some CPU, without those of the build.

#include "ops/mul-mat-rows/mul-mat-rows.cpp"

// the one function of ggml-cpu that the kernels call, on CPUs that do not convert F16 by themselves
void ggml_cpu_fp16_to_fp32(const ggml_fp16_t * x, float * y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        y[i] = ggml_fp16_to_fp32(x[i]);
    }
}

// what it calls for other types, which are not tested here
extern "C" void ggml_barrier(ggml_threadpool *) {}

bool dw::quant_rows_support(ggml_type) {
    return false;
}

int64_t dw::quant_block_size(ggml_type) {
    return 1;
}

size_t dw::quant_row_size(ggml_type, int64_t) {
    return 0;
}

void dw::quantise_row(ggml_type, const float *, char *, int64_t, int64_t) {}

void dw::quant_rows(ggml_type, const quant_product &, int, int) {}

namespace {

template <ggml_type type, int R, int C>
void one(int64_t n, const char * weights, size_t stride, const float * x, float * out) {
    const char * in[C];
    float *      to[C];
    for (int c = 0; c < C; ++c) {
        in[c] = (const char *) (x + c * n);
        to[c] = out + c * tile_rows;
    }
    dots<type, R, C>(n, weights, stride, in, to);
}

template <ggml_type type> void all(int64_t n, const char * weights, size_t stride, const float * x, float * out) {
    constexpr int size = tile_rows * tile_cols;
    for (int c = 0; c < tile_cols; ++c) { // rows and columns one by one
        for (int r = 0; r < tile_rows; ++r) {
            one<type, 1, 1>(n, weights + r * stride, stride, x + c * n, out + c * tile_rows + r);
        }
    }
    for (int r = 0; r < tile_rows; ++r) { // a row with all columns
        one<type, 1, tile_cols>(n, weights + r * stride, stride, x, out + size + r);
    }
    for (int c = 0; c < tile_cols; ++c) { // a column with all rows
        one<type, tile_rows, 1>(n, weights, stride, x + c * n, out + 2 * size + c * tile_rows);
    }
    one<type, tile_rows, tile_cols>(n, weights, stride, x, out + 3 * size);
    float few[few_cols * tile_rows]; // half of the rows at a time, with more columns: the first ones again
    for (int half = 0; half < 2; ++half) {
        const int    rows = tile_rows / 2;
        const char * in[few_cols];
        float *      to[few_cols];
        for (int c = 0; c < few_cols; ++c) {
            in[c] = (const char *) (x + c % tile_cols * n);
            to[c] = few + c * tile_rows + half * rows;
        }
        dots<type, tile_rows / 2, few_cols>(n, weights + half * rows * stride, stride, in, to);
    }
    std::copy_n(few, size, out + 4 * size);
}

} // namespace

// weights [8][n] of 16-bit values, x f32[3][n]; out f32[5][tile_cols][tile_rows]: the same products by five tiles.
// Returns tile_cols * tile_rows.
extern "C" int every_tile(int bf16, int64_t n, const char * weights, const float * x, float * out) {
    bf16 != 0 ? all<GGML_TYPE_BF16>(n, weights, 2 * n, x, out) : all<GGML_TYPE_F16>(n, weights, 2 * n, x, out);
    return tile_rows * tile_cols;
}
