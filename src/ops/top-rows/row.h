// How dw_top_rows packs a row of its result: f32[2 K + 2], in values of four bytes.
//
//     [0, K)     ids of the K best tokens, best first: int32, the bits in a tensor of f32
//     [K, 2 K)   their logits, f32
//     2 K        the greatest logit, f32
//     2 K + 1    the logarithm of the sum of all exponentials, f32
//
// A GGML_OP_CUSTOM node has one result of one type, so ids travel as bits: they are copied, never converted, and never
// read through a pointer of another type. The best id is a row's first value: drafters copy it to an i32 tensor on
// the device. Writers and readers of rows go through this header; Python asks "dw_top_rows_layout" in the registry of
// the CPU backend. Test: tests/ops/test_top_rows.py.

#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define DW_HOST_DEVICE __host__ __device__
#else
#define DW_HOST_DEVICE
#endif

namespace dw::top_rows {

// where the parts of a row of K tokens begin
struct row_layout {
    int64_t ids, logits, greatest, log_sum, n_values;
};

DW_HOST_DEVICE constexpr row_layout layout_for(int64_t k) {
    return { 0, k, 2 * k, 2 * k + 1, 2 * k + 2 };
}

static_assert(layout_for(1).ids == 0, "a row begins with its best token");

// K of a row of n values
constexpr int64_t k_of(int64_t n_values) {
    return n_values / 2 - 1;
}

// "dw_top_rows_layout" of the CPU backend's registry
using layout_of_t = row_layout (*)(int64_t k);
row_layout layout_of(int64_t k);

class row_writer {
  public:
    DW_HOST_DEVICE row_writer(float * row, int64_t k) :
        row_(row),
        at_(layout_for(k)) {}

    DW_HOST_DEVICE void token(int64_t rank, int32_t id, float logit) const {
        memcpy(row_ + at_.ids + rank, &id, sizeof(id));
        row_[at_.logits + rank] = logit;
    }

    DW_HOST_DEVICE void sums(float greatest, float log_sum) const {
        row_[at_.greatest] = greatest;
        row_[at_.log_sum]  = log_sum;
    }

  private:
    float *    row_;
    row_layout at_;
};

// of a row on the host
class row_reader {
  public:
    row_reader(const float * row, int64_t k) :
        row_(row),
        at_(layout_for(k)) {}

    int32_t id(int64_t rank) const {
        int32_t id;
        memcpy(&id, row_ + at_.ids + rank, sizeof(id));
        return id;
    }

    const float * logits() const { return row_ + at_.logits; } // f32[K]
    float         greatest() const { return row_[at_.greatest]; }
    float         log_sum() const { return row_[at_.log_sum]; }

  private:
    const float * row_;
    row_layout    at_;
};

} // namespace dw::top_rows
