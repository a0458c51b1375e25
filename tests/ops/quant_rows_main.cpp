// The quantised products as a program, for tests/ops/test_quant_cpus.py: compiled for a CPU, run here or in QEMU.
// quant_rows_main TYPE N ROWS COLS STRIDE < (weights[ROWS][STRIDE bytes], f32 x[COLS][N]) > f32 out[COLS][ROWS]

#include "ops/mul-mat-rows/quant-rows.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#ifdef __ARM_NEON
using half = __fp16;
#else
using half = _Float16;
#endif

// ggml's own are in a library that is not built for the other CPU
extern "C" ggml_fp16_t ggml_fp32_to_fp16(float value) {
    const half  converted = (half) value;
    ggml_fp16_t bits;
    std::memcpy(&bits, &converted, sizeof(bits));
    return bits;
}

int main(int argc, char ** argv) {
    if (argc != 6) {
        return 2;
    }
    const auto    type   = (ggml_type) std::atoi(argv[1]);
    const int64_t n      = std::atoll(argv[2]);
    const int64_t n_rows = std::atoll(argv[3]);
    const int64_t n_cols = std::atoll(argv[4]);
    const size_t  stride = std::atoll(argv[5]);
    if (!dw::quant_rows_support(type)) {
        return 3;
    }
    std::vector<char>  weights(n_rows * stride);
    std::vector<float> x(n_cols * n), out(n_cols * n_rows);
    if (std::fread(weights.data(), 1, weights.size(), stdin) != weights.size() ||
        std::fread(x.data(), sizeof(float), x.size(), stdin) != x.size()) {
        return 4;
    }
    const size_t              row_size = dw::quant_row_size(type, n);
    std::vector<char>         quantised(n_cols * row_size);
    std::vector<const char *> in;
    std::vector<float *>      to;
    for (int64_t c = 0; c < n_cols; ++c) {
        in.push_back(quantised.data() + c * row_size);
        to.push_back(out.data() + c * n_rows);
        dw::quantise_row(type, x.data() + c * n, quantised.data() + c * row_size, 0, n / dw::quant_block_size(type));
    }
    for (int ith = 0; ith < 3; ++ith) {
        dw::quant_rows(type, { n, weights.data(), stride, n_rows, in.data(), to.data(), n_cols }, ith, 3);
    }
    return std::fwrite(out.data(), sizeof(float), out.size(), stdout) == out.size() ? 0 : 5;
}
