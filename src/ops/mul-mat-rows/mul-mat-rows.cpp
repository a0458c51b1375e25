// Row-exact MUL_MAT and MUL_MAT_ID: see mul-mat-rows.h.

#include "ops/mul-mat-rows/mul-mat-rows.h"

#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "ops/mul-mat-rows/half-dots.h"
#include "ops/mul-mat-rows/quant-rows.h"

#include <algorithm>
#include <vector>

namespace {

using namespace dw::half_rows;

// Columns of activations, f32 or quantised, and where their results go, to be met by tiles of weight rows.
struct columns {
    std::vector<const char *> x;
    std::vector<float *>      out;

    void clear() {
        x.clear();
        out.clear();
    }

    void add(const char * in, char * result) {
        x.push_back(in);
        out.push_back((float *) result);
    }
};

// R weight rows with the columns from c on, C at a time
template <ggml_type type, int R, int C>
void tile(int64_t n, const char * weights, size_t stride, const columns & cols, int64_t row, size_t c) {
    for (; c + C <= cols.x.size(); c += C) {
        float * out[C];
        for (int i = 0; i < C; ++i) {
            out[i] = cols.out[c + i] + row;
        }
        dots<type, R, C>(n, weights, stride, &cols.x[c], out);
    }
    if constexpr (C > 1) {
        tile<type, R, C - 1>(n, weights, stride, cols, row, c);
    }
}

// weight rows [first, last) of one matrix with all columns
template <ggml_type type>
void rows(int64_t n, const char * weights, size_t stride, const columns & cols, int64_t first, int64_t last) {
    int64_t row = first;
    if (cols.x.size() > tile_cols && cols.x.size() <= few_cols) {
        constexpr int half = tile_rows / 2;
        for (; row + half <= last; row += half) {
            tile<type, half, few_cols>(n, weights + row * stride, stride, cols, row, 0);
        }
    }
    for (; row + tile_rows <= last; row += tile_rows) {
        tile<type, tile_rows, tile_cols>(n, weights + row * stride, stride, cols, row, 0);
    }
    for (; row < last; ++row) {
        tile<type, 1, 1>(n, weights + row * stride, stride, cols, row, 0);
    }
}

// this thread's share of a matrix's n_rows weight rows with all columns
void rows(const ggml_compute_params * params, ggml_type type, int64_t n, const char * weights, size_t stride,
          const columns & cols, int64_t n_rows) {
    if (dw::quant_rows_support(type)) {
        dw::quant_rows(type, { n, weights, stride, n_rows, cols.x.data(), cols.out.data(), (int64_t) cols.x.size() },
                       params->ith, params->nth);
        return;
    }
    const int64_t n_tiles = (n_rows + tile_rows - 1) / tile_rows;
    const int64_t first   = n_tiles * params->ith / params->nth * tile_rows;
    const int64_t last    = std::min(n_rows, n_tiles * (params->ith + 1) / params->nth * tile_rows);
    if (type == GGML_TYPE_F16) {
        rows<GGML_TYPE_F16>(n, weights, stride, cols, first, last);
    } else {
        rows<GGML_TYPE_BF16>(n, weights, stride, cols, first, last);
    }
}

// Whether the products here take rows of n of these weights. Keys in a cache may have heads of less than a block.
bool supported(ggml_type type, int64_t n) {
    return type == GGML_TYPE_F16 || type == GGML_TYPE_BF16 ||
           (dw::quant_rows_support(type) && n > 0 && n % dw::quant_block_size(type) == 0);
}

bool supported(const ggml_compute_params * params, const ggml_tensor * dst) {
    const ggml_tensor * src0 = dst->src[0];
    const ggml_tensor * src1 = dst->src[1];
    return params->use_ref && supported(src0->type, src0->ne[0]) && src1->type == GGML_TYPE_F32 &&
           dst->type == GGML_TYPE_F32 && src0->nb[0] == ggml_type_size(src0->type) && src1->nb[0] == sizeof(float) &&
           dst->nb[0] == sizeof(float);
}

// Rows of src1 as these weights take them: as they are, or quantised.
struct activations {
    const char * data;
    size_t       nb1, nb2, nb3;

    const char * row(int64_t i1, int64_t i2, int64_t i3) const { return data + i1 * nb1 + i2 * nb2 + i3 * nb3; }
};

// Quantise the blocks [first, last) of all rows of x, counted through, into out.
void quantise(ggml_type weights, const ggml_tensor * x, char * out, int64_t first, int64_t last) {
    const int64_t per_row  = x->ne[0] / dw::quant_block_size(weights);
    const size_t  row_size = dw::quant_row_size(weights, x->ne[0]);
    for (int64_t b = first; b < last;) {
        const int64_t row = b / per_row, end = std::min(last, (row + 1) * per_row);
        const int64_t i1 = row % x->ne[1], i2 = row / x->ne[1] % x->ne[2], i3 = row / x->ne[1] / x->ne[2];
        const char *  values = (const char *) x->data + i1 * x->nb[1] + i2 * x->nb[2] + i3 * x->nb[3];
        dw::quantise_row(weights, (const float *) values, out + row * row_size, b - row * per_row, end - row * per_row);
        b = end;
    }
}

// Threads share the work and wait for each other. Of few values each thread does all: that takes less than to wait.
activations prepare(const ggml_compute_params * params, ggml_type weights, const ggml_tensor * x) {
    constexpr int64_t few = 4096;
    if (!dw::quant_rows_support(weights)) {
        return { (const char *) x->data, x->nb[1], x->nb[2], x->nb[3] };
    }
    static thread_local std::vector<char> own;
    const size_t                          row_size = dw::quant_row_size(weights, x->ne[0]);
    const int64_t                         n_blocks = ggml_nelements(x) / dw::quant_block_size(weights);
    char *                                out      = (char *) params->wdata;
    if (ggml_nelements(x) <= few) {
        own.resize(std::max(own.size(), row_size * ggml_nrows(x)));
        out = own.data();
        quantise(weights, x, out, 0, n_blocks);
    } else {
        quantise(weights, x, out, n_blocks * params->ith / params->nth, n_blocks * (params->ith + 1) / params->nth);
        ggml_barrier(params->threadpool);
    }
    return { out, row_size, row_size * x->ne[1], row_size * x->ne[1] * x->ne[2] };
}

} // namespace

bool dw_op_mul_mat_rows(const ggml_compute_params * params, ggml_tensor * dst) {
    if (!supported(params, dst)) {
        return false;
    }
    const ggml_tensor * src0 = dst->src[0];
    const ggml_tensor * src1 = dst->src[1];
    GGML_TENSOR_BINARY_OP_LOCALS

    const int64_t               r2 = ne12 / ne02; // matrices of src1 to one of src0
    const int64_t               r3 = ne13 / ne03;
    const activations           x  = prepare(params, src0->type, src1);
    static thread_local columns cols; // kept for its memory
    for (int64_t i03 = 0; i03 < ne03; ++i03) {
        for (int64_t i02 = 0; i02 < ne02; ++i02) {
            cols.clear();
            for (int64_t i13 = i03 * r3; i13 < (i03 + 1) * r3; ++i13) {
                for (int64_t i12 = i02 * r2; i12 < (i02 + 1) * r2; ++i12) {
                    for (int64_t i11 = 0; i11 < ne11; ++i11) {
                        cols.add(x.row(i11, i12, i13), (char *) dst->data + i11 * nb1 + i12 * nb2 + i13 * nb3);
                    }
                }
            }
            rows(params, src0->type, ne00, (const char *) src0->data + i02 * nb02 + i03 * nb03, nb01, cols, ne01);
        }
    }
    return true;
}

bool dw_op_mul_mat_id_rows(const ggml_compute_params * params, ggml_tensor * dst) {
    if (!supported(params, dst)) {
        return false;
    }
    const ggml_tensor * src0 = dst->src[0];
    const ggml_tensor * src1 = dst->src[1];
    const ggml_tensor * ids  = dst->src[2];
    GGML_TENSOR_BINARY_OP_LOCALS

    const activations x = prepare(params, src0->type, src1);
    // columns by expert, so that an expert's weights are read once for all rows that chose it
    static thread_local std::vector<columns> by_expert;
    by_expert.resize(std::max<size_t>(by_expert.size(), ne02));
    for (auto & cols : by_expert) {
        cols.clear();
    }
    for (int64_t t = 0; t < ids->ne[1]; ++t) {
        for (int64_t s = 0; s < ids->ne[0]; ++s) {
            const int32_t expert = *(const int32_t *) ((const char *) ids->data + s * ids->nb[0] + t * ids->nb[1]);
            by_expert[expert].add(x.row(s % ne11, t, 0), (char *) dst->data + s * nb1 + t * nb2);
        }
    }
    for (int64_t e = 0; e < ne02; ++e) {
        if (!by_expert[e].x.empty()) {
            rows(params, src0->type, ne00, (const char *) src0->data + e * nb02, nb01, by_expert[e], ne01);
        }
    }
    return true;
}

void dw_dot_row(ggml_type type, int64_t n, const void * row, const float * x, float * out) {
    const char * in = (const char *) x;
    if (type == GGML_TYPE_F16) {
        dots<GGML_TYPE_F16, 1, 1>(n, (const char *) row, 0, &in, &out);
    } else {
        dots<GGML_TYPE_BF16, 1, 1>(n, (const char *) row, 0, &in, &out);
    }
}
