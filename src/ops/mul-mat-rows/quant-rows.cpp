// See quant-rows.h.

#include "ops/mul-mat-rows/quant-rows.h"

#include "ops/mul-mat-rows/quant-blocks.h"
#include "ops/mul-mat-rows/quant-cpu.h"

#include <algorithm>
#include <cstring>

namespace dw {

#ifdef DW_QUANT_WIDEST

namespace {

// --- activations

constexpr int part = 16; // values
using floats       = float __attribute__((vector_size(part * 4)));
using ints         = int32_t __attribute__((vector_size(part * 4)));
using bytes        = int8_t __attribute__((vector_size(part)));

inline floats load(const float * p) {
    floats v;
    std::memcpy(&v, p, sizeof(v));
    return v;
}

// The largest magnitude of n values; NaN if one is not finite.
template <int n> float largest(const float * x) {
    floats most{}, odd{}; // odd: 0, or NaN
    for (int i = 0; i < n; i += part) {
        const floats v    = load(x + i);
        const floats size = v < 0.0f ? -v : v;
        most              = size > most ? size : most;
        odd += v - v;
    }
    float result = 0.0f, all_odd = 0.0f;
    for (int i = 0; i < part; ++i) {
        result = std::max(result, most[i]);
        all_odd += odd[i];
    }
    return result + all_odd;
}

// x / d, to nearest: adding 1.5 * 2^23 leaves the integer in the low bits
inline ints rounded(const floats & x, float inverse) {
    constexpr float magic = 12582912.0f;
    return (ints) (x * inverse + magic) - (ints) (floats{} + magic);
}

inline void store_quants(const ints & values, int8_t bits, void * out) {
    const bytes packed = __builtin_convertvector(values, bytes) ^ bits;
    std::memcpy(out, &packed, sizeof(packed));
}

inline int16_t sum(const ints & values) {
    uint32_t result = 0; // what is not finite gives any integers, and NaN as its scale
    for (int i = 0; i < part; ++i) {
        result += (uint32_t) values[i];
    }
    return (int16_t) result;
}

void quantise(const float * x, block_q8_K & out) {
    const float most    = largest<QK_K>(x);
    const float inverse = most > 0.0f ? 127.0f / most : 0.0f;
    out.d               = most / 127.0f;
    for (int i = 0; i < QK_K; i += part) {
        const ints q        = rounded(load(x + i), inverse);
        out.bsums[i / part] = sum(q);
        store_quants(q, 0, out.qs + i);
    }
}

void quantise(const float * x, block_q8_0 & out) {
    const float       most    = largest<QK8_0>(x);
    const float       inverse = most > 0.0f ? 127.0f / most : 0.0f;
    const ggml_fp16_t d       = ggml_fp32_to_fp16(most / 127.0f);
    std::memcpy(&out, &d, sizeof(d));
    for (int i = 0; i < QK8_0; i += part) {
        store_quants(rounded(load(x + i), inverse), is_vnni ? -128 : 0, out.qs + i);
    }
}

bool has_super_blocks(ggml_type weights) {
    return weights == GGML_TYPE_Q4_K || weights == GGML_TYPE_Q5_K || weights == GGML_TYPE_Q6_K ||
           weights == GGML_TYPE_IQ4_XS;
}

} // namespace

bool quant_rows_support(ggml_type type) {
    return has_super_blocks(type) || type == GGML_TYPE_Q4_0 || type == GGML_TYPE_Q5_0 || type == GGML_TYPE_Q8_0 ||
           type == GGML_TYPE_IQ4_NL;
}

int64_t quant_block_size(ggml_type weights) {
    return has_super_blocks(weights) ? QK_K : QK8_0;
}

size_t quant_row_size(ggml_type weights, int64_t n) {
    return has_super_blocks(weights) ? n / QK_K * sizeof(block_q8_K) : n / QK8_0 * sizeof(block_q8_0);
}

void quantise_row(ggml_type weights, const float * x, char * out, int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
        if (has_super_blocks(weights)) {
            quantise(x + b * QK_K, ((block_q8_K *) out)[b]);
        } else {
            quantise(x + b * QK8_0, ((block_q8_0 *) out)[b]);
        }
    }
}

void quant_rows(ggml_type type, const quant_product & m, int ith, int nth) {
#ifdef DW_QUANT_HAS_NARROW
    constexpr int few_cols = 2;
    // direct ways of 16 rows: quant-direct.h
    const bool takes_wide = type == GGML_TYPE_Q4_K || (is_vnni && type == GGML_TYPE_Q6_K);
    if (m.n_cols <= few_cols && !takes_wide) {
        return quant_products_narrow(type, m, ith, nth);
    }
#endif
    quant_products_wide(type, m, ith, nth);
}

#else

bool quant_rows_support(ggml_type) {
    return false;
}

int64_t quant_block_size(ggml_type) {
    return 1;
}

size_t quant_row_size(ggml_type, int64_t) {
    return 0;
}

void quantise_row(ggml_type, const float *, char *, int64_t, int64_t) {}

void quant_rows(ggml_type, const quant_product &, int, int) {}

#endif

} // namespace dw
